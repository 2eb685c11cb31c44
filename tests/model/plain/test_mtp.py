import dataclasses

import pytest
import torch

from equipoise_model.plain.transformer import Transformer


def their_mtp(theirs, model):
    """transformers' MTP modules with our weights."""
    from transformers.modeling_layers import MtpModel

    modules = MtpModel(theirs, len(model.mtp_layers)).eval()
    state = {}
    for name, tensor in model.state_dict().items():
        if name.startswith("mtp_layers."):
            _, depth, rest = name.split(".", maxsplit=2)
            own = rest.startswith(("enorm", "hnorm", "eh_proj", "shared_head"))
            rest = rest.replace("shared_head.norm", "post_norm")
            rest += "_proj" if rest.endswith((".gate_up", ".down")) else ""
            state[f"layers.{depth}.{rest}" if own else f"layers.{depth}.mtp_block.{rest}"] = tensor
    missing, unexpected = modules.load_state_dict(state, strict=False)
    assert not unexpected
    assert not [name for name in missing if name.startswith("layers.")]
    return modules


@pytest.mark.parametrize("depth", [1, 2])
def test_the_logits_of_each_depth_are_those_of_transformers(
    config, random_model, hugging_face, depth
):
    model = random_model(dataclasses.replace(config, num_nextn_predict_layers=depth), mtp=True)
    tokens = torch.randint(64, (1, 20), generator=torch.Generator().manual_seed(0))
    output = model.forward_train(tokens)
    theirs = hugging_face(model)
    modules = their_mtp(theirs, model)
    hidden = theirs.model(tokens).last_hidden_state
    torch.testing.assert_close(output.hidden_BTD, hidden, atol=1e-4, rtol=0)
    for k, logits in enumerate(output.mtp_logits):
        length = 20 - k - 1
        hidden = modules.forward_layer(
            k,
            hidden[:, :length],
            torch.arange(length)[None] + k + 1,
            None,
            input_ids=tokens[:, k + 1 :],
        )
        torch.testing.assert_close(logits, theirs.lm_head(hidden), atol=1e-4, rtol=0)


def test_serving_does_without_the_modules(config):
    model = Transformer(config)
    assert not model.forward_train(torch.zeros(1, 4, dtype=torch.int64)).mtp_logits
