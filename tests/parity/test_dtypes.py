"""In half precision free-running answers drift apart over rounding; what is compared is each token's logprob, under the
model's own forward pass over the same tokens."""

import pytest
import torch

from chairlift import ContinuousBatchingConfig
from tests.parity.models import FAMILIES, LENGTH_DEPENDENT, PROMPTS, build

FAMILIES_OF_ONE_PASS = [family for family in FAMILIES if family not in LENGTH_DEPENDENT]


@pytest.mark.parametrize("family", FAMILIES_OF_ONE_PASS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_logprobs_are_those_of_a_forward_pass(family: str, dtype: torch.dtype, tolerance: float) -> None:
    """Tolerance: mean difference, as a share of the spread of the logits."""
    model = build(family, dtype)
    config = ContinuousBatchingConfig(max_batch_tokens=16, page_size=16, return_logprobs=True)
    outputs = model.generate_batch(
        PROMPTS[True], max_new_tokens=6, do_sample=False, continuous_batching_config=config
    ).values()
    errors, spreads = [], []
    for output in outputs:
        sequence = torch.tensor([output.prompt_ids + output.generated_tokens])
        with torch.no_grad():
            logits = model(sequence).logits[0, len(output.prompt_ids) - 1 : -1].float()
        wanted = logits.log_softmax(-1).gather(1, sequence[0, len(output.prompt_ids) :, None])[:, 0]
        errors.append((torch.tensor(output.logprobs) - wanted).abs())
        spreads.append(logits.std(-1))
    assert torch.cat(errors).mean() < tolerance * torch.cat(spreads).mean()
