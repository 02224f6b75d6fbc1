"""An engine leaves the user's model alone, and follows what the user does to it."""

from collections.abc import Iterator

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from chairlift import ContinuousBatchingConfig, ContinuousBatchingManager
from tests.parity.models import PROMPTS, build

CONFIG = ContinuousBatchingConfig(max_batch_tokens=16, page_size=16, return_logprobs=True)
GREEDY = GenerationConfig(do_sample=False, max_new_tokens=20, pad_token_id=0)
PROMPT = PROMPTS[False][2]


@pytest.fixture
def model() -> PreTrainedModel:
    return build("llama")


@pytest.fixture
def manager(model: PreTrainedModel) -> Iterator[ContinuousBatchingManager]:
    with model.continuous_batching_context_manager(
        generation_config=GREEDY, continuous_batching_config=CONFIG
    ) as manager:
        yield manager


def by_generate(model: PreTrainedModel) -> list[int]:
    tokens = model.generate(torch.tensor([PROMPT]), generation_config=GREEDY)
    return tokens[0, len(PROMPT) :].tolist()


def by_engine(manager: ContinuousBatchingManager) -> list[int]:
    return manager.get_result(manager.add_request(PROMPT)).generated_tokens


def start_long_request(manager: ContinuousBatchingManager) -> str:
    """A request that is well under way and far from its end."""
    request_id = manager.add_request(PROMPT, max_new_tokens=100, streaming=True)
    assert manager.get_result(request_id).new_tokens
    return request_id


def finish(manager: ContinuousBatchingManager, request_id: str) -> list[int]:
    return list(manager.request_id_iter(request_id))[-1].generated_tokens


def train_one_step(model: PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    batch = torch.tensor([PROMPT, PROMPT[::-1]])
    model.zero_grad()
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def test_training_forward_and_generate_work_while_an_engine_runs(model: PreTrainedModel) -> None:
    model.train()
    loss, gradients = train_one_step(model)
    model.eval()
    wanted = by_generate(model)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits
    with model.continuous_batching_context_manager(
        generation_config=GREEDY, continuous_batching_config=CONFIG
    ) as manager:
        long = start_long_request(manager)
        model.train()
        loss_beside, gradients_beside = train_one_step(model)
        model.eval()
        assert by_generate(model) == wanted
        with torch.no_grad():
            assert torch.equal(model(torch.tensor([PROMPT])).logits, logits)
        assert finish(manager, long)[:20] == wanted
    assert torch.equal(loss_beside, loss)
    assert gradients_beside.keys() == gradients.keys()
    assert all(torch.equal(gradients_beside[name], gradients[name]) for name in gradients)


@pytest.mark.parametrize("is_training", [True, False])
def test_nothing_of_the_callers_changes(model: PreTrainedModel, is_training: bool) -> None:
    model.train(is_training)
    model.set_attn_implementation("eager")
    config = GenerationConfig(do_sample=True, temperature=0.7, max_new_tokens=5)
    before = config.to_dict(), model.generation_config.to_dict(), model.config.to_dict(), [*model.state_dict()]
    random_state = torch.get_rng_state()
    model.generate_batch(PROMPTS[False], generation_config=config, continuous_batching_config=CONFIG)
    assert before == (
        config.to_dict(),
        model.generation_config.to_dict(),
        model.config.to_dict(),
        [*model.state_dict()],
    )
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.config._attn_implementation == "eager"
    assert all(module.training is is_training for module in model.modules())


def test_hooks_fire_in_the_engine(model: PreTrainedModel) -> None:
    """Those registered before the engine was built, and those registered after."""
    layer, projection = model.model.layers[1], model.model.layers[0].mlp.up_proj
    seen: list[str] = []
    before = layer.register_forward_hook(lambda *_: seen.append("before"))
    with model.continuous_batching_context_manager(
        generation_config=GREEDY, continuous_batching_config=CONFIG
    ) as manager:
        seen.clear()
        plain = by_engine(manager)
        assert set(seen) == {"before"}
        changing = projection.register_forward_hook(lambda module, args, out: -out)
        with manager.pause(weights_changed=True):
            pass
        changed = by_engine(manager)
        assert changed == by_generate(model) != plain
        changing.remove()
        before.remove()
        manager.reset_prefix_cache()
        seen.clear()
        assert by_engine(manager) == plain
        assert not seen


def update_in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.neg_()


def update_a_norm_in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight.mul_(-2.0)


def replace_a_parameter(model: PreTrainedModel) -> None:
    projection = model.model.layers[0].self_attn.v_proj
    projection.weight = torch.nn.Parameter(-projection.weight.detach())


def replace_the_data(model: PreTrainedModel) -> None:
    projection = model.model.layers[0].self_attn.v_proj
    projection.weight.data = -projection.weight.data


def load_other_weights(model: PreTrainedModel) -> None:
    model.load_state_dict({name: -tensor for name, tensor in model.state_dict().items()})


NOTICED = [update_in_place, update_a_norm_in_place, replace_a_parameter, load_other_weights]


@pytest.mark.parametrize("change", NOTICED)
def test_changed_weights_are_noticed_between_runs(
    model: PreTrainedModel, manager: ContinuousBatchingManager, change: object
) -> None:
    before = by_engine(manager)
    change(model)
    assert by_engine(manager) == by_generate(model) != before


@pytest.mark.parametrize("change", NOTICED)
def test_changed_weights_are_noticed_in_a_pause(
    model: PreTrainedModel, manager: ContinuousBatchingManager, change: object
) -> None:
    """What is under way goes on with the new weights, as if its tokens so far had been its prompt."""
    long = start_long_request(manager)
    with manager.pause():
        change(model)
        so_far = manager.get_result(long, timeout=0)
        while (newer := manager.get_result(long, timeout=0)) is not None:
            so_far = newer
    tokens = finish(manager, long)
    known = PROMPT + (so_far.generated_tokens if so_far else [])
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPT + tokens])).logits[0].argmax(-1).tolist()
    assert (PROMPT + tokens)[len(known) + 1 :] == wanted[len(known) : -1]
    assert by_engine(manager) == by_generate(model)


def write_through_data(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.down_proj.weight.data.neg_()
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(-1.0)


@pytest.mark.parametrize("change", [write_through_data, replace_the_data])
def test_weights_written_through_data_are_followed_when_said(
    model: PreTrainedModel, manager: ContinuousBatchingManager, change: object
) -> None:
    before = by_engine(manager)
    with manager.pause(weights_changed=True):
        change(model)
    assert by_engine(manager) == by_generate(model) != before


def test_reset_prefix_cache_follows_weights_too(model: PreTrainedModel, manager: ContinuousBatchingManager) -> None:
    before = by_engine(manager)
    write_through_data(model)
    manager.reset_prefix_cache()
    assert by_engine(manager) == by_generate(model) != before
