"""The checks of encoder-decoders: pairs, denoisers and the length of targets against each other and other keys."""

from typing import TYPE_CHECKING

from jaxstack.config.bounds import require
from jaxstack.config.pictures import PICTURES

if TYPE_CHECKING:
    from jaxstack.config.data import DataConfig
    from jaxstack.config.run import Config


def check_denoisers(data: "DataConfig") -> None:
    """Checks the keys of the group `data` that are for encoder-decoders.

    Raises:
      ConfigError: they do not fit each other.
    """
    names = [one.source for one in data.mixture or (data,)]
    shown, texts_only = list(data.denoisers), not {"pairs", *PICTURES} & {*names}
    require(
        not texts_only or not data.languages,
        f"data.languages={list(data.languages)} is for translations and for names of pictures, but data.source="
        f"{names[0]} has neither. Remove it, or use data.source=pairs.",
    )
    require(
        len({*data.languages}) == len(data.languages),
        f"data.languages={list(data.languages)} names a language twice. Name each once.",
    )
    require(
        bool(data.denoisers) or not texts_only or data.target_len is None,
        f"data.target_len={data.target_len} is for data.denoisers or data.source=pairs. Remove it, or set one of them.",
    )
    if not data.denoisers:
        return
    whole = [name for name in names if name in ("chat", "labels")]
    require(
        not whole,
        f"data.denoisers={shown} hides spans of texts, which data.source={''.join(whole[:1])} does not have. Use "
        f"data.source=path.",
    )
    require(
        {*names} != {"pairs"},
        f"data.denoisers={shown} hides spans of texts, but data.source=pairs has translations. Remove data.denoisers.",
    )
    require(
        not data.packing,
        f"data.denoisers={shown} hides spans of rows that span documents, and data.packing=true would part them. Use "
        f"data.packing=false.",
    )
    require(
        not data.domains,
        f"data.denoisers={shown} makes rows that span documents, but data.domains={list(data.domains)} chooses experts "
        f"by document. Use one of the two.",
    )
    for each in data.denoisers:
        require(
            each.mode is None or bool(each.mode.strip()),
            f"data.denoisers={shown} has an empty mode. Name a token such as [R], or leave it null.",
        )
        each.text_length(data.seq_len, data.target_len)


def check_seq2seq(cfg: "Config") -> None:
    """Checks that the family `encoder_decoder` is used with pairs or denoisers, and they only with it.

    Raises:
      ConfigError: the family does not suit the data.
    """
    data, model = cfg.data, cfg.model
    names = [one.source for one in data.mixture or (data,)]
    both = model.family == "encoder_decoder"
    key = f"data.denoisers={list(data.denoisers)}" if data.denoisers else "data.source=pairs"
    require(
        both or not (data.denoisers or "pairs" in names),
        f"{key} is for encoder-decoders, but model.family={model.family}. Use --model.family=encoder_decoder, or leave "
        f"{key.partition('=')[0]} out.",
    )
    every = model.moe.every
    require(
        both or every == 1,
        f"model.moe.every={every} is for encoder-decoders, but model.family={model.family}. Use every=1.",
    )
    for name, depth in (("encoder_layers", model.encoder_depth), ("num_layers", model.num_layers)):
        require(
            not model.moe.num_experts or depth % every == 0,
            f"model.moe.every={every} does not divide model.{name}={depth}. Change one of them.",
        )
    texts = [name for name in names if name != "pairs"]
    require(
        not both or not texts or bool(data.denoisers),
        f"model.family=encoder_decoder learns hidden spans or translations, but data.source={''.join(texts[:1])} has "
        f"texts, and data.denoisers is empty. Use --data.denoisers='[{{rate: 0.15, span: 3}}]', or data.source=pairs.",
    )
