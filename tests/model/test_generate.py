import pytest
import torch

from equipoise_model.dispatch import ExpertParallel
from equipoise_model.generate import greedy
from equipoise_model.placement import PlacementTables
from equipoise_model.presets import TINY

PROMPTS = [[5, 6, 7], list(range(40)), [9], [63, 0, 63, 0, 1]]


@pytest.mark.parametrize("row_block", [None, 16])
def test_tokens_are_those_of_transformers(config, random_model, hugging_face, row_block):
    model = random_model(config, row_block=row_block)
    theirs = hugging_face(model)
    outputs = greedy(model, PROMPTS, max_tokens=12)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        sequence = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1
        )
        assert output == sequence[0, len(prompt) :].tolist()


@pytest.mark.parametrize("chunk_tokens", [1, 7, 100])
def test_cutting_prompts_changes_no_token(random_model, chunk_tokens):
    model = random_model(TINY, row_block=16)
    whole = greedy(model, PROMPTS, max_tokens=8)
    assert greedy(model, PROMPTS, max_tokens=8, chunk_tokens=chunk_tokens) == whole


def test_a_prompt_gets_the_same_tokens_alone_and_in_company(random_model):
    model = random_model(TINY, row_block=16)
    together = greedy(model, PROMPTS, max_tokens=8)
    assert [greedy(model, [prompt], max_tokens=8)[0] for prompt in PROMPTS] == together


def test_a_sequence_ends_with_its_stop_token_and_others_continue(random_model):
    model = random_model(TINY, row_block=16)
    whole = greedy(model, PROMPTS, max_tokens=8)
    stop = whole[1][3]
    stopped = greedy(model, PROMPTS, max_tokens=8, stop_tokens={stop})
    assert stopped == [
        output[: output.index(stop) + 1] if stop in output else output for output in whole
    ]
    assert len(stopped[1]) <= 4


def test_another_layout_gives_the_same_tokens(random_model):
    model = random_model(TINY, row_block=16)
    expected = greedy(model, PROMPTS, max_tokens=8)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = random_model(TINY, row_block=16)
    for moe, original in zip(shuffled.moe_layers, model.moe_layers, strict=True):
        for slot, expert in enumerate(order):
            moe.experts.gate_up[slot] = original.experts.gate_up[expert]
            moe.experts.down[slot] = original.experts.down[expert]
    placement = PlacementTables.from_layout([order] * TINY.num_moe_layers, num_experts=32)
    experts = ExpertParallel.local(TINY, placement)
    assert greedy(shuffled, PROMPTS, max_tokens=8, experts=experts) == expected


def test_no_prompts_give_no_tokens(random_model):
    assert greedy(random_model(TINY), [], max_tokens=3) == []
