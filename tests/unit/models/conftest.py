import pytest

from roll_td.models import export_hf, load_model
from tests.unit.models.small import config, weights


@pytest.fixture
def exported(tmp_path):
    model = load_model(config(), 0)
    export_hf(tmp_path / "m", model, weights(model))
    return tmp_path / "m"
