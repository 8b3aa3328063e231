"""The configuration of a whole run, which is checked when it is made, and what data fill in."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from jaxstack.config.bounds import require
from jaxstack.config.checks import check
from jaxstack.config.groups import Groups
from jaxstack.config.model import ModelConfig
from jaxstack.config.parallel import MeshConfig
from jaxstack.config.pictures import PictureConfig

SEARCHED_KEYS = (
    *(f"mesh.{axis}" for axis in MeshConfig().sizes), "train.grad_accum", "pipeline.schedule", "pipeline.chunks",
    "pipeline.microbatches", "train.remat",
)  # fmt: skip
"""Keys that a search for a mesh chooses. They change time and memory, but not what a step computes."""

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Group = TypeVar("Group", bound="DataclassInstance")


@dataclass(frozen=True)
class Config(Groups):
    """Has everything that a run depends on, with one attribute for each group of keys. Values are checked when it is
    made."""

    def __post_init__(self) -> None:
        check(self)

    def with_model(self, model: ModelConfig) -> "Config":
        """Returns the configuration of another model, such as the run's model with adapters merged.

        `run.init_adapter` has adapters of the run's own model, so it is left out.
        """
        return replace(self, run=replace(self.run, init_adapter=None), model=model)


def resolve(
    config: Config, vocab_size: int | None, image: tuple[int, ...] = (), buckets: tuple[int, ...] = ()
) -> Config:
    """Returns the configuration with the values that depend on data: sizes of vocabulary and position table, mask's id.

    If the axes `tensor` and `pipe` do not divide the rows of the vocabulary, `model.pad_vocab_to` is raised.

    Args:
      config: the configuration as the user gave it.
      vocab_size: number of tokens of the tokenizer. `None` means `model.vocab_size`, which must then be set.
      image: height, width and channels of the pictures of the data. Empty means the size that the model names.
      buckets: the lengths that were chosen for `data.buckets=auto`. Empty means the lengths of the configuration.

    Raises:
      ConfigError: the model's vocabulary is smaller than the tokenizer's, or the model has pictures of another size.
    """
    if buckets:
        config = replace(config, data=replace(config.data, buckets=buckets))
    model = config.model
    if model.pictures is not None:
        size: dict[str, Any] = {model.pictures.family: _with_image(model.pictures, image, config.data.seq_len)}
        model = replace(model, **size)
    mesh = config.mesh
    source = config.run.init_from
    masks = model.masks_tokens
    mask_id = config.data.mask_id
    own_row = masks and mask_id is None  # the token that hides others is not one of the tokenizer's
    if vocab_size is None:
        assert model.vocab_size is not None
        vocab_size = model.vocab_size - own_row
    if own_row:
        mask_id = vocab_size
        vocab_size = vocab_size + 1
    advice = "Raise it, or leave it null" if source is None else f"Use the tokenizer of run.init_from={source}"
    if own_row:
        advice += ", or set data.mask_id to the id of a mask that it has"
    require(
        model.vocab_size is None or model.vocab_size >= vocab_size,
        f"model.vocab_size={model.vocab_size} is less than the tokenizer's {vocab_size}. {advice}.",
    )
    vocabulary = model.vocab_size or vocab_size
    sizes = mesh.known_sizes
    found: dict[str, Any] = {"vocab_size": vocabulary}
    padded = model.pad_vocab_to or vocabulary
    shards = sizes["pipe"] * sizes["tensor"] if model.family != "diffusion" else 1  # a table of classes is not split
    if padded >= vocabulary and padded % shards:  # rows of zeros, which change no result
        found["pad_vocab_to"] = -(-padded // shards) * shards
    positions = model.max_positions
    if model.positions == "learned" and positions is None:
        positions = config.text_length
        positions += model.first_position
    require(
        mask_id is None or mask_id < vocabulary,
        f"data.mask_id={mask_id} is not below the vocabulary of {vocabulary}. Lower it, or leave it null.",
    )
    model = _changed(model, max_positions=positions, **found)
    return _changed(config, model=model, data=_changed(config.data, mask_id=mask_id))


def _changed(group: Group, **values: Any) -> Group:
    """Returns a group with these values, or the group itself if it has them. Checks take the time of a search."""
    same = all(getattr(group, name) is value or getattr(group, name) == value for name, value in values.items())
    return group if same else replace(group, **values)


def with_values(config: Config, values: Mapping[str, object]) -> Config:
    """Returns the configuration with other values, by dotted keys of two words, after all its checks.

    Raises:
      ConfigError: the values do not fit each other.
    """
    groups: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    changed: dict[str, Any] = {group: replace(getattr(config, group), **new) for group, new in groups.items()}
    return replace(config, **changed)


def flat(config: "DataclassInstance", prefix: str = "") -> dict[str, object]:
    """Returns every value of a configuration under its dotted key: `{"model.num_layers": 6, ...}`."""
    values: dict[str, object] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value) and not isinstance(value, type):
            values |= flat(value, f"{prefix}{f.name}.")
        else:
            values[f"{prefix}{f.name}"] = value
    return values


def _with_image(size: PictureConfig, image: tuple[int, ...], seq_len: int) -> PictureConfig:
    """Returns the size of a model's pictures with the size of the pictures of the data.

    Args:
      size: the size of the model's pictures, as the user gave it.
      image: height, width and channels. Empty means the size that the model names.
      seq_len: the number of patches that the user gave, `data.seq_len`.

    Raises:
      ConfigError: the size is unknown or differs from the model's size, or `data.seq_len` is not the number of
        patches.
    """
    group = f"model.{size.family}"
    require(
        bool(size.image or image) and (not image or size.image in ((), image)),
        f"{group}.image={list(size.image)} is not the size of the pictures of the data, "
        f"{list(image) or 'which are not read here'}. Give their height, width and channels, such as [8, 8, 1].",
    )
    size = replace(size, image=size.image or image)
    require(
        seq_len == size.num_patches,
        f"data.seq_len={seq_len} is not the number of patches of a picture: {list(size.image)} with "
        f"{group}.patch_size={size.patch_size} has {size.num_patches}. Use --data.seq_len={size.num_patches}.",
    )
    return size
