"""Sends an exported folder to a repository of the Hugging Face hub, with a model card."""

from pathlib import Path
from typing import Any

from jaxstack.common import errors
from jaxstack.config import ConfigError, ModelConfig, OptimConfig

_CARD = """\
---
library_name: {library}
tags:
- jaxstack
---

# {title}

{what}, trained with jaxstack and exported in {dtype}.

| | |
|---|---|
{rows}

## Use

```python
{use}
```

## Limits

Nobody has tested this model for a purpose. Add what it is for, what it was trained on, and a license.
"""
_USE = """\
from transformers import AutoModel, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repo}")
model = AutoModel.from_pretrained("{repo}")  # or the class of your task, such as AutoModelForCausalLM"""
_USE_ADAPTERS = """\
from peft import PeftModel

model = PeftModel.from_pretrained(base_model, "{repo}")  # base_model is the model that the adapters were trained on"""


def model_card(
    repo: str,
    what: str,
    dtype: str,
    model: ModelConfig,
    optim: OptimConfig,
    seq_len: int,
    records: list[dict[str, object]],
    adapters: bool,
) -> str:
    """Returns the text of README.md: what the model is, how it was trained, and how to load it.

    Paths of this machine are left out.

    Args:
      what: the kind of the model, such as `A llama model`.
      records: lines of `metrics.jsonl`, from which the last loss is taken.
    """
    rows = {
        "layers, width, vocabulary": f"{model.num_layers:,}, {model.d_model:,}, {model.vocab_size or 0:,}",
        "tokens of a sequence": f"{seq_len:,}",
        "optimizer": f"{optim.name}, learning rate {optim.lr:g}",
    }
    for key, name in (("eval_loss", "held-out loss"), ("eval_bits_per_byte", "held-out bits per byte")):
        last = next((record for record in reversed(records) if isinstance(record.get(key), float)), None)
        if last is not None:
            rows[f"{name} after step {last['step']:,}"] = f"{last[key]:.4f}"
    return _CARD.format(
        library="peft" if adapters else "transformers",
        title=repo.rpartition("/")[2],
        what=what,
        dtype=dtype,
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        use=(_USE_ADAPTERS if adapters else _USE).format(repo=repo),
    )


def require_repository(repo: str) -> None:
    """Makes sure that you may write to a repository, and creates it, private, if it does not exist.

    Raises:
      ConfigError: the name is wrong, you are not logged in, or the hub cannot be reached.
    """
    try:
        _api().create_repo(repo, private=True, exist_ok=True)
    except Exception as error:  # of the hub, of its web client, or of the disk
        raise ConfigError(
            f"--push={repo} is not possible: {_reason(error)}. Use a name such as you/model, and run `hf auth login`."
        ) from None


def push(folder: Path, repo: str) -> str:
    """Sends a folder in one commit, and returns the address of the commit.

    Raises:
      ConfigError: it was not sent.
    """
    try:
        commit = _api().upload_folder(repo_id=repo, folder_path=folder, commit_message="Export of jaxstack")
    except Exception as error:  # of the hub, of its web client, or of the disk
        raise ConfigError(
            f"{folder} is complete, but --push={repo} failed: {_reason(error)}. Send it with `hf upload {repo} "
            f"{folder}`."
        ) from None
    return str(commit.commit_url)


def _api() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise ConfigError("--push needs the huggingface_hub library. Run pip install 'jaxstack[hf]'.") from None
    return HfApi(library_name="jaxstack")


def _reason(error: Exception) -> str:
    """Returns the first sentence of an error of the hub, without the numbers of the request."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = next((line for line in lines if "Request ID" not in line), type(error).__name__)
    return errors.shortened(text).rstrip(".")
