"""The keys of a `config.json` that say which layers have experts, as `model.moe.layers` and back."""

from jaxstack.common.counts import plural
from jaxstack.config import ExpertLayers, ModelConfig
from jaxstack.config.expert_layers import rule_of
from jaxstack.hf.families import Family
from jaxstack.hf.json_keys import Keys


def read(keys: Keys, family: Family, num_layers: int, encoder_layers: int | None) -> ExpertLayers:
    """Takes the keys of a family that say which layers have experts; see `Family.expert_keys`.

    Raises:
      ConfigError: a value that is not supported, or that leaves no layer with experts.
    """
    match family.expert_keys:
        case "first":
            first = _count(keys, "first_k_dense_replace", *family.default_of("first_k_dense_replace"))
            step = _count(keys, "moe_layer_freq", 1, least=1)
            # DeepSeek's own code counts from layer 0, also behind the first dense layers.
            has = [i >= first and i % step == 0 for i in range(num_layers)]
            if not any(has):
                raise keys.error(
                    "first_k_dense_replace", first, f"Leave experts to some of {plural(num_layers, 'layer')}"
                )
        case "step":
            step = _count(keys, "decoder_sparse_step", 1, least=1)
            dense = keys.take("mlp_only_layers", None) or []
            if not isinstance(dense, list) or any(type(i) is not int for i in dense):
                raise keys.error("mlp_only_layers", dense, "Give a list of layers")
            has = [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]
            if not any(has):
                raise keys.error("mlp_only_layers", dense, f"Leave experts to some of {plural(num_layers, 'layer')}")
        case _:
            return _counts(keys, num_layers, encoder_layers)
    return rule_of(has)


def keys_of(family: Family, model: ModelConfig) -> dict[str, object]:
    """Returns the keys for a model. Where the family cannot say which layers have experts, they mean another model."""
    has = model.has_experts
    layers = model.moe.layers
    match family.expert_keys:
        case "first":
            return {"first_k_dense_replace": has.index(True) if any(has) else len(has), "moe_layer_freq": 1}
        case "step":
            if not layers.is_list and layers.first == layers.every - 1:
                return {"decoder_sparse_step": layers.every, "mlp_only_layers": []}
            return {"decoder_sparse_step": 1, "mlp_only_layers": [i for i, one in enumerate(has) if not one]}
        case "counts":
            encoder = layers.of_stack(model.encoder_depth, encoder=True)
            return {"num_sparse_encoder_layers": sum(encoder), "num_sparse_decoder_layers": sum(has)}
    return {}


def _count(keys: Keys, key: str, *default: object, least: int = 0) -> int:
    """Takes a key that must be an integer, of at least a number."""
    value = keys.take(key, *default)
    if type(value) is not int or value < least:
        raise keys.error(key, value, f"Give an integer of {least} or more")
    return value


def _counts(keys: Keys, num_layers: int, encoder_layers: int | None) -> ExpertLayers:
    """Returns the layers of Switch Transformers: the second one of each group, as often as two keys say."""
    steps = []
    for side, depth in (("encoder", encoder_layers or num_layers), ("decoder", num_layers)):
        key = f"num_sparse_{side}_layers"
        count = keys.take(key)
        keys.take(f"{side}_sparse_step", None)  # newer files have what follows from the others
        if type(count) is not int or count < 1 or depth % count:
            raise keys.error(key, count, f"Give a divisor of {plural(depth, 'layer')}")
        steps.append((depth, depth // count))
    numbers = [tuple(range(min(1, step - 1), depth, step)) for depth, step in steps]
    if steps[0][1] == steps[1][1]:
        step = steps[0][1]
        return ExpertLayers(first=min(1, step - 1), every=step)
    return ExpertLayers(numbers=numbers[1], encoder_numbers=numbers[0])
