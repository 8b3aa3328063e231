"""Checks of a run's steps, data, adapters and samples against each other."""

from jaxstack.common.counts import plural
from jaxstack.config.bounds import require
from jaxstack.config.groups import Groups
from jaxstack.config.scheme import NF4_GROUPS
from jaxstack.config.training import TAUGHT_FAMILIES


def check_training(cfg: Groups) -> None:
    """Checks the steps, the data, adapters, samples and rounding of a run.

    Raises:
      ConfigError: two keys do not fit each other.
    """
    _check_steps(cfg)
    _check_documents(cfg)
    _check_domains(cfg)
    _check_adapters(cfg)
    _check_lengths(cfg)
    _check_base_width(cfg)
    _check_distill(cfg)
    _check_preference(cfg)
    _check_rewards(cfg)
    _check_qat(cfg)
    _check_keep_zeros(cfg)
    _check_offload(cfg)


def _check_steps(cfg: Groups) -> None:
    data = cfg.data
    train = cfg.train
    require(
        data.batch_size % train.grad_accum == 0,
        f"train.grad_accum={train.grad_accum} does not divide data.batch_size={data.batch_size}. Use a divisor.",
    )
    require(
        not cfg.profile.span or cfg.profile.span[1] <= train.steps,
        f"profile.steps={cfg.profile.steps} ends after train.steps={train.steps}. Name steps of the run.",
    )


def _check_documents(cfg: Groups) -> None:
    most = cfg.data.known_documents
    require(
        most is None or cfg.has_segments,
        f"data.max_documents={most} counts the documents that attention tells apart, but rows have no segments. Use "
        f"data.packing=true, or leave data.max_documents out.",
    )


def _check_domains(cfg: Groups) -> None:
    data = cfg.data
    moe = cfg.model.moe
    domains = moe.num_experts if moe.router == "domain" else 0
    names = list(data.domains)
    taught = cfg.distill.teacher is not None and not domains  # the teacher may have experts by domain
    require(
        domains > 0 or not names or taught,
        f"data.domains={names} is set without model.moe.router=domain. Leave data.domains empty.",
    )
    require(
        len(names) == domains or taught,
        f"data.domains={names} has {plural(len(names), 'pattern')}, but model.moe.router=domain has "
        f"{plural(domains, 'expert')}. Give one pattern per expert.",
    )
    require(
        not domains or data.source in ("stdlib", "path", "pairs"),
        f"data.domains matches names of files, which data.source={data.source} does not have. Use data.source=path.",
    )
    require(
        cfg.sample.domain < max(domains, 1),
        f"sample.domain={cfg.sample.domain} is out of range: data.domains has {plural(domains, 'domain')}. Count "
        f"domains from 0.",
    )


def _check_adapters(cfg: Groups) -> None:
    require(
        not cfg.model.lora.rank or cfg.run.init_from is not None,
        f"model.lora.rank={cfg.model.lora.rank} trains adapters of an existing model, but run.init_from is "
        f"not set. Name a run or a Hugging Face folder, or use model.lora.rank=0 to train all parameters.",
    )
    require(
        cfg.run.init_adapter is None or cfg.model.lora.rank > 0,
        f"run.init_adapter={cfg.run.init_adapter} needs model.lora with the same rank, alpha and targets. Make the run "
        f"with `jaxstack import BASE RUN --adapter={cfg.run.init_adapter}`, which sets them.",
    )


def _check_lengths(cfg: Groups) -> None:
    sample = cfg.sample
    seq_len = cfg.data.seq_len
    prompts = ("?",) if sample.prompts is None else sample.prompts  # prompts from the held-out text are cut to fit
    longest = max((len(prompt.encode()) for prompt in prompts), default=0)
    require(
        sample.beams == 1 or not longest or longest + sample.tokens <= seq_len,
        f"sample.tokens={sample.tokens} after a prompt of {plural(longest, 'byte')} is more than "
        f"data.seq_len={seq_len}, the limit of beam search. Lower it, or use sample.beams=1.",
    )
    positions = cfg.model.max_positions if cfg.model.positions == "learned" else None
    first = cfg.model.first_position
    key = "target_len" if cfg.model.reads_captions else "seq_len"
    rows = f"data.{key}={cfg.text_length}" + (f" and model.first_position={first}" if first else "")
    require(
        positions is None or positions >= cfg.text_length + first,
        f"model.max_positions={positions} is less than {rows}. Raise it, or leave it null.",
    )


def _check_base_width(cfg: Groups) -> None:
    require(
        cfg.model.base_width is None or cfg.optim.name != "sgd",
        f"model.base_width={cfg.model.base_width} scales the learning rates of optimizers whose updates have a fixed "
        f"size, and those of optim.name=sgd have none. Use optim.name=adamw or another one, or leave base_width null.",
    )


def _check_distill(cfg: Groups) -> None:
    """Checks that the model can learn from a teacher.

    Raises:
      ConfigError: a family that no teacher teaches, keys that a teacher of pictures does not read, or domains of a
        teacher with rows of several lengths.
    """
    distill = cfg.distill
    if distill.teacher is None:
        return
    require(
        cfg.model.family in TAUGHT_FAMILIES,
        f"distill.teacher={distill.teacher} does not teach model.family={cfg.model.family}, whose losses compare rows "
        f"or belong to several models. Leave it null, or use a model of {', '.join(TAUGHT_FAMILIES)}.",
    )
    for key in ("temperature", "top_tokens"):
        require(
            cfg.model.family != "diffusion" or getattr(distill, key) == getattr(type(distill), key),
            f"distill.{key}={getattr(distill, key)} is for teachers of tokens, but model.family=diffusion learns a "
            f"velocity. Leave it out.",
        )
    require(
        not cfg.data.domains or cfg.model.moe.num_experts > 0 or not cfg.data.buckets,
        f"data.domains={list(cfg.data.domains)} is for the teacher alone, which needs rows of one length, but "
        f"data.buckets={cfg.data.buckets}. Leave data.buckets out.",
    )


def _check_preference(cfg: Groups) -> None:
    """Checks that a run learns from pairs alone, if it does, and has a reference.

    Raises:
      ConfigError: keys of the group are set without pairs, pairs are mixed with other data, or there is no reference.
    """
    pair = cfg.learned_preference
    data = cfg.data
    learns_scores = pair is not None and pair.loss == "reward"
    require(
        learns_scores or not cfg.model.reward_head,
        f"model.reward_head=true is learned with preference.loss=reward, but data.source={data.source} and "
        f"preference.loss={cfg.preference.loss}. Use that loss with data.source=preferences, or reward_head=false.",
    )
    require(
        cfg.model.reward_head or not learns_scores,
        "preference.loss=reward needs a head that scores texts, but model.reward_head=false. Use "
        "--model.reward_head=true.",
    )
    if pair is None:
        for key, value in vars(cfg.preference).items():
            require(
                value == getattr(type(cfg.preference), key),
                f"preference.{key}={value} is for pairs of completions, but data.source={data.source} has none. Use "
                f"data.source=preferences, or leave it out.",
            )
        return
    others = [one.source for one in data.mixture if one.source != "preferences"]
    require(
        not others,
        f"data.mixture={list(data.mixture)} has another source beside preferences, whose loss differs. Use preferences "
        f"alone; preference.nll_weight also learns the chosen completions.",
    )
    require(
        cfg.model.family == "decoder" and cfg.model.moe.router not in ("domain", "timestep"),
        f"data.source=preferences teaches plain decoders, but model.family={cfg.model.family} and "
        f"model.moe.router={cfg.model.moe.router}. Use a decoder without domains.",
    )
    require(
        not data.buckets,
        f"data.buckets={data.buckets} is not supported with data.source=preferences. Use data.packing=true, which puts "
        f"several pairs into a row.",
    )
    require(
        cfg.distill.teacher is None,
        f"distill.teacher={cfg.distill.teacher} teaches the next token, which data.source=preferences does not learn. "
        f"Leave it null.",
    )
    require(
        not pair.has_reference or pair.reference is not None or cfg.run.init_from is not None,
        f"preference.loss={pair.loss} compares the model with the one that the run starts with, but run.init_from is "
        f"not set. Name a run that was trained on conversations, or use preference.loss=orpo or simpo.",
    )


def _check_rewards(cfg: Groups) -> None:
    """Checks that a run can learn from rewards of its own completions, if it does.

    Raises:
      ConfigError: keys of the group are set without prompts, or something of the run does not fit sampling.
    """
    rewards = cfg.learned_rewards
    data = cfg.data
    if rewards is None:
        for key, value in vars(cfg.rl).items():
            require(
                value == getattr(type(cfg.rl), key),
                f"rl.{key}={value} is for rewards of completions, but data.source={data.source} has no prompts. Use "
                f"data.source=prompts, or leave it out.",
            )
        return
    require(
        not data.mixture,
        f"data.mixture={list(data.mixture)} has prompts, which cannot be mixed. Use data.source=prompts, and one file.",
    )
    require(
        cfg.model.family == "decoder" and cfg.model.moe.router not in ("domain", "timestep"),
        f"data.source=prompts teaches plain decoders, but model.family={cfg.model.family} and "
        f"model.moe.router={cfg.model.moe.router}. Use a decoder without domains.",
    )
    require(
        not data.packing and not data.buckets,
        f"data.packing={data.packing}, data.buckets={data.buckets} are for texts that exist before the run. Leave both "
        f"out with data.source=prompts.",
    )
    require(
        data.batch_size % rewards.group == 0,
        f"rl.group={rewards.group} does not divide data.batch_size={data.batch_size}, the number of completions of a "
        f"step. Use a divisor.",
    )
    require(
        rewards.tokens < data.seq_len,
        f"rl.tokens={rewards.tokens} leaves no room for a prompt in data.seq_len={data.seq_len}. Lower it.",
    )
    _check_sampling(cfg)


def _check_sampling(cfg: Groups) -> None:
    """Checks that completions can be sampled with the model as it learns.

    Raises:
      ConfigError: a key has a value that the sampler does not know, or there is no model to begin with.
    """
    model = cfg.model
    one_kind = all(len(side) == len(side[0].kinds) == 1 for side in model.expert_segments.values())
    unlike = model.states_key or ("" if one_kind else model.moe.layers.shown)
    require(
        cfg.mesh.pipe == 1 or not unlike,
        f"{unlike} gives a model layers from which mesh.pipe={cfg.mesh.pipe} cannot sample completions. Use mesh.fsdp "
        f"or mesh.tensor.",
    )
    require(
        cfg.mesh.pipe == 1 or not cfg.rl.exact or cfg.train.remat == "full",
        f"train.remat={cfg.train.remat} saves what the forward pass of mesh.pipe={cfg.mesh.pipe} computes, which "
        f"changes last bits, but rl.exact=true. Use train.remat=full, or rl.exact=false.",
    )
    unsuitable = {
        "mesh.context": (cfg.mesh.context, 1),
        "mesh.partitioner": (cfg.mesh.partitioner, "manual"),
        "model.dropout": (cfg.model.dropout, 0),
        "model.lora.rank": (cfg.model.lora.rank, 0),
        "train.qat": (cfg.train.qat, "none"),
        "train.debug": (cfg.train.debug, False),
        "debug.eager": (cfg.debug.eager, False),
        "distill.teacher": (cfg.distill.teacher, None),
    }
    for key, (value, needed) in unsuitable.items():
        require(
            value == needed,
            f"{key}={value} does not fit data.source=prompts, whose completions are sampled while the model learns. "
            f"Leave it out.",
        )
    require(
        cfg.run.init_from is not None,
        "data.source=prompts improves a model that already answers, but run.init_from is not set. Name a run that was "
        "trained on conversations.",
    )


def _check_qat(cfg: Groups) -> None:
    """Checks that the matrices which training rounds can be stored.

    Raises:
      ConfigError: fp8 has groups, or the layout of nf4 has no such group.
    """
    name = cfg.train.qat
    group = cfg.train.qat_group
    require(
        name != "fp8" or group is None,
        f"train.qat=fp8 has one scale for each output, but train.qat_group={group}. Use train.qat_group=null.",
    )
    require(
        name != "nf4" or group in NF4_GROUPS,
        f"train.qat=nf4 cannot be stored with train.qat_group={group}. Use one of {', '.join(map(str, NF4_GROUPS))}.",
    )


def _check_keep_zeros(cfg: Groups) -> None:
    """Checks that there are zeros to keep.

    Raises:
      ConfigError: nothing is read that could have them, or only adapters are trained.
    """
    require(
        not cfg.optim.keep_zeros or cfg.run.init_from is not None,
        "optim.keep_zeros=true keeps the zeros of an existing model, but run.init_from is not set. Name a run of "
        "`jaxstack compress prune`, or use optim.keep_zeros=false.",
    )
    require(
        not (cfg.optim.keep_zeros and cfg.model.lora.rank),
        f"optim.keep_zeros=true would keep new adapters at zero, but model.lora.rank={cfg.model.lora.rank}. Use "
        f"optim.keep_zeros=false: frozen matrices keep their zeros.",
    )


def _check_offload(cfg: Groups) -> None:
    train = cfg.train
    require(
        not train.offloads_residuals or train.remat != "none",
        f"train.offload={train.offload} stores what train.remat saves, but train.remat=none leaves that choice to XLA. "
        f"Use train.remat=selective, dots or full, or train.offload=optimizer.",
    )
    require(
        not train.offloads_residuals or cfg.mesh.pipe == 1,
        f"train.offload={train.offload} is for layers in one loop, but the stages of mesh.pipe={cfg.mesh.pipe} store "
        f"residuals of several microbatches themselves. Use train.offload=optimizer, or mesh.pipe=1.",
    )
    require(
        not train.offloads_residuals or cfg.kernels.layers != "unrolled",
        f"train.offload={train.offload} needs a loop over layers: XLA does not finish compiling the copies of "
        f"kernels.layers=unrolled. Use kernels.layers=auto.",
    )
    require(
        not train.offloads_optimizer or cfg.kernels.update != "branch",
        f"train.offload={train.offload} copies the optimizer's state in every step, but kernels.update=branch runs the "
        f"optimizer in good steps only. Use kernels.update=auto.",
    )
    require(
        not train.offloads_optimizer or cfg.optim.name != "sgd" or cfg.optim.b1 > 0,
        f"train.offload={train.offload} has nothing to store, as optim.name=sgd has no momentum with optim.b1=0. Use "
        f"train.offload=none, or another optim.b1.",
    )
    require(
        train.offload == "none" or not cfg.debug.eager,
        f"train.offload={train.offload} needs a compiled step, but debug.eager=true runs operations one by one. Use "
        f"train.offload=none.",
    )
