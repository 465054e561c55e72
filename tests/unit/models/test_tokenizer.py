import pytest

from roll_td.config.model import ModelConfig
from roll_td.models import export_hf, load_model, load_tokenizer
from tests.unit.models.small import config, weights


@pytest.fixture
def tokenizer_folder(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<end>": 0, "a": 1, "b": 2}, unk_token="<end>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<end>",
        unk_token="<end>",
        chat_template="{{ messages[0].content }}",
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def rendered(tokenizer):
    return tokenizer.apply_chat_template([{"role": "user", "content": "a b"}], tokenize=False)


def test_a_tokenizer_has_its_own_template_or_the_one_given(tokenizer_folder, tmp_path):
    assert load_tokenizer(ModelConfig(path=tokenizer_folder))("a b").input_ids == [1, 2]
    other = ModelConfig(path="/elsewhere", tokenizer=tokenizer_folder)
    assert rendered(load_tokenizer(other)) == "a b"
    other.chat_template = "{{ messages[0].role }}"
    assert rendered(load_tokenizer(other)) == "user"
    (tmp_path / "chat.jinja").write_text("[{{ messages[0].content }}]", encoding="utf-8")
    other.chat_template = str(tmp_path / "chat.jinja")
    assert rendered(load_tokenizer(other)) == "[a b]"


def test_an_export_has_the_tokenizer_with_its_template(tokenizer_folder, tmp_path):
    model = load_model(config(), 0)
    given = ModelConfig(path=tokenizer_folder, chat_template="{{ messages[0].role }}")
    export_hf(tmp_path / "out", model, weights(model), load_tokenizer(given))
    assert rendered(load_tokenizer(ModelConfig(path=str(tmp_path / "out")))) == "user"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"config": {"model_type": "qwen3"}}, "no tokenizer; set model.tokenizer to a folder"),
        ({"tokenizer": "/no/such"}, "model.tokenizer=/no/such: no such folder"),
        ({"chat_template": "no.jinja"}, "chat_template=no.jinja: no such file, and no Jinja"),
    ],
)
def test_a_tokenizer_that_is_not_there_is_refused(tokenizer_folder, fields, message):
    fields = fields if "config" in fields else {"path": tokenizer_folder} | fields
    with pytest.raises(ValueError) as caught:
        load_tokenizer(ModelConfig(**fields))
    assert message in str(caught.value)


def test_a_model_folder_without_a_tokenizer_is_refused(exported):
    # transformers makes a tokenizer without words of it
    with pytest.raises(ValueError, match=r"no tokenizer there; set model\.tokenizer"):
        load_tokenizer(ModelConfig(path=str(exported)))
