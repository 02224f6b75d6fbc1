"""A model's outline, from its config alone, says what its start-up finds."""

import pytest
import torch

from chairlift.errors import UnsupportedModelError
from chairlift.model.loader import Shadow, model_facts
from chairlift.model.outline import Outline
from tests.parity.models import FAMILIES, build


@pytest.mark.parametrize("family", FAMILIES)
def test_the_outline_is_the_model(family: str) -> None:
    model = build(family)
    shadow, outline = Shadow(model), Outline(model.config)
    assert outline.layers == shadow.layers
    assert outline.facts == model_facts(model, shadow)
    assert all(parameter.is_meta for parameter in outline.model.parameters())


def test_types_and_packing() -> None:
    config = build("llama").config
    half = Outline(config, dtype="bfloat16", pack_weights=False).facts
    assert (half.dtype, half.packed_bytes) == ("bfloat16", 0)
    assert 2 * half.parameter_bytes == Outline(config, dtype="float32").facts.parameter_bytes
    with pytest.raises(UnsupportedModelError, match="float64"):
        Outline(config, dtype="float64")


def test_what_cannot_be_served_is_refused_by_name() -> None:
    config = build("qwen2").config
    config.layer_types = ["linear_attention", "full_attention"]
    with torch.device("cpu"), pytest.raises(UnsupportedModelError, match="linear_attention"):
        Outline(config)
