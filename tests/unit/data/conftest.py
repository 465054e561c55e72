"""A tokenizer of single characters, with chat templates of several kinds, and files of rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<pad>", "<bos>", "<eos>", "<system>", "<user>", "<assistant>"]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789+=# \n"

MARKED = (
    "{{ bos_token }}{% for m in messages %}{{ '<' + m.role + '>' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Marks the answers."""
PLAIN = (
    "{{ bos_token }}{% for m in messages %}{{ '<' + m.role + '>' + m.content + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""As ChatML: every turn ends with the end token and a line break; no marks."""
FORGETFUL = (
    "{{ bos_token }}{% for m in messages %}{{ '<' + m.role + '>' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '##' }}{% endif %}{{ m.content + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Writes an answer differently once the chat has gone on, as templates with thoughts do."""
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + MARKED
)
"""Refuses some chats."""


TEMPLATES = {"marked": MARKED, "plain": PLAIN, "forgetful": FORGETFUL, "strict": STRICT, "": None}


@pytest.fixture
def make_tokenizer() -> Callable[..., Any]:
    """make_tokenizer(name of a template, adds_bos): each character or special token is a token."""

    def make(template: str = "marked", adds_bos: bool = False) -> Any:
        vocabulary = {token: number for number, token in enumerate([*SPECIALS, *LETTERS])}
        inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
        inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        inner.decoder = decoders.Fuse()
        if adds_bos:
            inner.post_processor = processors.TemplateProcessing(
                single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
            )
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=inner,
            pad_token="<pad>",
            bos_token="<bos>",
            eos_token="<eos>",
            additional_special_tokens=SPECIALS[3:],
        )
        tokenizer.chat_template = TEMPLATES[template]
        return tokenizer

    return make


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """write(name, rows): a JSONL file; a row that is text stands as it is. Returns the path."""

    def lines(name: str, rows: Iterable[Any]) -> str:
        texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / name
        path.write_text("".join(text + "\n" for text in texts))
        return str(path)

    return lines
