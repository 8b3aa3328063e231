"""Scores of an imported folder equal those of `transformers` with the tokenizer's own beginning of a text."""

import numpy as np
import pytest

import jaxstack
from jaxstack.cli.parser import execute

torch = pytest.importorskip("torch", reason="needs the extra [parity]")
transformers = pytest.importorskip("transformers", reason="needs the extra [parity]")
tokenizers = pytest.importorskip("tokenizers", reason="needs the extra [hf]")
pytestmark = pytest.mark.slow

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
KINDS = {
    "llama": ("<s>", "</s>", lambda size: transformers.LlamaConfig(vocab_size=size, **SIZES)),
    "gemma": ("<bos>", "<eos>", lambda size: transformers.Gemma2Config(vocab_size=size, sliding_window=6, **SIZES)),
}
TEXTS = ["hello there", "a", "the cat sat on the mat, the cat did.", "{bos}hello", "{bos}{bos}a b", "x{eos}y"]


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    """Returns a folder that `transformers` wrote, whose tokenizer puts a special token before a text."""
    bos, eos, make_config = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param) / "folder"
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        ["the cat sat on the mat, the cat did. hello there"] * 3, 300, 1, False, ["<pad>", eos, bos]
    )
    bpe._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        f"{bos}:0 $A:0", f"{bos}:0 $A:0 {bos}:1 $B:1", [(bos, 2)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token=bos, eos_token=eos, pad_token="<pad>"
    )
    config = make_config(len(tokenizer))
    config.update({"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * (1.0 if weight.ndim == 1 else 0.3))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("special_tokens", [True, False])
def test_scores_are_those_of_transformers_with_its_own_tokens(special_tokens, folder, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    execute(["import", str(folder), str(tmp_path / "run"), f"--data.special_tokens={str(special_tokens).lower()}"])
    run = jaxstack.load(tmp_path / "run")
    for template in TEXTS:
        text = template.format(bos=tokenizer.bos_token, eos=tokenizer.eos_token)
        # A text that spells the first token has it already. `transformers` would put a second one before it.
        spelled = text.startswith(tokenizer.bos_token)
        ids = tokenizer(text, add_special_tokens=special_tokens and not spelled, return_tensors="pt")["input_ids"]
        if ids.shape[1] < 2:
            continue
        logits = model(ids).logits[0]
        expected = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy(force=True)
        # Twenty times the rounding of float32, which sums in another order add up to.
        assert np.abs(run.score(text) - expected).max() <= 2e-5 * logits.abs().max().item()
