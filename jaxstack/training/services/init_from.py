"""Parameters of another run, or of a Hugging Face folder: initial ones, and those of a teacher or a reference."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxstack import families, hf
from jaxstack.checkpoint import manifest, run_dir, store, verify
from jaxstack.common import files
from jaxstack.common.counts import plural
from jaxstack.common.tree import flatten
from jaxstack.config import Config, ConfigError, DataConfig, ModelConfig, PipelineConfig
from jaxstack.config.reading import parse
from jaxstack.config.training import PreferenceConfig
from jaxstack.data import Tokenizer, same_vocabulary
from jaxstack.data.tokenizers import read_saved_tokenizer
from jaxstack.families import encoder, surgery
from jaxstack.families.context import make_context
from jaxstack.families.token_prediction import without_prediction
from jaxstack.features import adapters, reward_head
from jaxstack.hf import coded_folder, configs, peft
from jaxstack.hf.coded_folder import CodedFolder
from jaxstack.hf.pretrained import PretrainedFolder
from jaxstack.models import params as parameters
from jaxstack.models.context import Context
from jaxstack.models.params import Params
from jaxstack.training.features.preference import Refer, make_refer, with_divergence
from jaxstack.training.features.qat import evaluated_params
from jaxstack.training.features.teacher import Teach, make_teach, without_gates
from jaxstack.training.services.checkpoint_layout import checkpoint_layout
from jaxstack.training.state import Recipe, TrainState, abstract_state, make_state, only_averaged_params, start_from

Source = Config | PretrainedFolder | CodedFolder
"""Where parameters are read from: a run, a Hugging Face folder, or the codes of `jaxstack compress quantize`."""


def find_source(name: str, key: str) -> Source:
    """Returns a run, as its configuration with its present folder in `run.dir`, or a folder of parameters.

    A run without a checkpoint is replaced by the source of its own initial parameters, `run.init_from`, with its
    `run.init_adapter`.

    Args:
      name: path of the folder.
      key: configuration key or flag that names it, for errors.

    Raises:
      ConfigError: the folder is neither, or has no parameters.
    """
    seen: list[Path] = []
    adapter: str | None = None
    while True:
        path = Path(name)
        if path in seen:
            raise ConfigError(f"{key}={seen[0]} is initialised from itself. Name a run with a checkpoint.")
        seen.append(path)
        if not (path / "config.yaml").exists():
            if (path / "config.json").exists():
                return PretrainedFolder(path, None if adapter is None else Path(adapter))
            raise ConfigError(
                f"{key}={path} is not a folder of a run (config.yaml) or of a Hugging Face model (config.json). "
                f"{(None if path.exists() else configs.how_to_fetch(path)) or 'Check the path.'}"
            )
        if coded_folder.is_coded(path):
            return CodedFolder(path)
        run = parse.parse_config([f"--config={path / 'config.yaml'}"])
        if manifest.steps(run_dir.checkpoints(path)):
            return replace(run, run=replace(run.run, dir=str(path)))
        if (path / "quarantine").is_dir():
            raise ConfigError(
                f"{key}={path} has only damaged checkpoints, which are in {path / 'quarantine'}. Restore a copy to "
                f"{run_dir.checkpoints(path)}, or train that run until it has saved one."
            )
        if run.run.init_from is None:
            raise ConfigError(f"{key}={path} has no checkpoint. Train that run until it has saved one.")
        name = run.run.init_from
        adapter = run.run.init_adapter


def restore_params(run: Config, ctx: Context, number: int | None = None, merge_adapters: bool = True) -> Params:
    """Restores the parameters of a run, sharded for the mesh of the context.

    With `optim.ema` they are the averages, and with `train.qat` their matrices are rounded. The other arrays of the
    optimizer are not read.

    Args:
      number: step of the checkpoint. `None` means the newest valid one.
      merge_adapters: whether the result has the parameters of `run.model.base` in place of `run.model`.

    Raises:
      ConfigError: no such checkpoint, or a damaged one.
    """
    saved = run_dir.checkpoints(Path(run.run.dir))
    recipe = Recipe.of(run)
    layout = checkpoint_layout(recipe, ctx, abstract_state(recipe, ctx))
    wanted = only_averaged_params(run.model, layout.abstract)
    if number is None:
        number = verify.latest_valid_step(saved, wanted)
    elif number not in manifest.steps(saved):
        raise ConfigError(f"{saved} has no step {number}. Use one of {sorted(manifest.steps(saved))}.")
    elif why := verify.corruption(saved, number, wanted):
        raise ConfigError(f"step {number} in {saved} is damaged: {why}. Use another step.")
    params = evaluated_params(recipe, layout.unpack(store.restore(saved, number, wanted)))
    if not (run.model.lora.rank and merge_adapters):
        return params
    shardings = jax.tree.map(ctx.layout.sharding, ctx.layout.parameters(families.spec(run.model.base)))

    def merge(trained: Params, base: Params) -> Params:
        return adapters.merge_adapters(run.model.lora, parameters.combine(trained, base))

    return jax.jit(merge, out_shardings=shardings, donate_argnums=1)(
        *parameters.partition(families.spec(run.model), params)
    )


def _without_modules(source: Source) -> Source:
    """Returns the source of a model without its modules of multi-token prediction, for a run that has none."""
    if isinstance(source, Config):
        return replace(source, model=without_prediction(source.model))
    if isinstance(source, PretrainedFolder):
        source.leave_modules()
    return source


def _folder_of(source: Source) -> Path:
    return Path(source.run.dir) if isinstance(source, Config) else source.folder


def require_same_tokenizer(source: Source, name: str, cfg: DataConfig, tokenizer: Tokenizer) -> None:
    """Makes sure that the data has the token ids with which a model was trained.

    A source that has no tokenizer.json is not checked.

    Args:
      source: the run or folder of the model.
      name: what names it, for errors: `run.init_from=DIR`.

    Raises:
      ConfigError: the source has another tokenizer.
    """
    folder = _folder_of(source)
    path = folder.resolve() / "tokenizer.json"
    if not path.is_file():
        return
    if isinstance(source, PretrainedFolder):
        content = files.read_json(path, "Restore it from a copy of the model.")
        saved = {"kind": "hf", "name": str(path), "tokenizer": content}
    else:
        saved = read_saved_tokenizer(path.parent).to_json()
    if same_vocabulary(saved, tokenizer.to_json()):
        return
    flag = f"--data.tokenizer={saved.get('name', saved['kind'])}"
    if cfg.source == "tokens" and cfg.format == "jaxstack":
        made = f"data.path={cfg.path} was made with the tokenizer {tokenizer.name}"
        advice = f"Build the file again with `jaxstack data build {flag}`"
    else:
        made = f"data.tokenizer={cfg.tokenizer}"
        advice = f"Use {flag}"
    if saved["kind"] == "chars":
        advice = f"Use text with exactly the {plural(len(saved['alphabet']), 'character')} of {path}"
    raise ConfigError(f"{made}, but {name} has another tokenizer, with other token ids. {advice}.")


def init_state_from(cfg: Config, ctx: Context, abstract: TrainState, tokenizer: Tokenizer) -> TrainState:
    """Returns the first state of a run with the parameters of `run.init_from`: another run or a Hugging Face folder.

    If this run has experts and the other has none, the other is up-cycled. Adapters of the other run are merged; those
    of this run get new initial values.

    Args:
      cfg: the resolved configuration of this run.
      abstract: shapes, dtypes and shardings of its state.

    Raises:
      ConfigError: a source that does not exist, has no checkpoint, or has another model or tokenizer, or no zeros
        that `optim.keep_zeros` could keep.
    """
    name = cfg.run.init_from
    source = find_source(str(name), "run.init_from")
    require_same_tokenizer(source, f"run.init_from={name}", cfg.data, tokenizer)
    if not cfg.model.mtp.depth:
        source = _without_modules(source)
    there = source.model.base
    here = cfg.model.base
    scores = here.reward_head and not there.reward_head  # the model gets this head now
    if scores:
        here = replace(here, reward_head=False)
    if there.family == here.family == "encoder":  # the head may be another one
        there = replace(there, labels=here.labels, label_each=here.label_each, label_pooling=here.label_pooling)
        there = replace(there, sentences=here.sentences)
    grows = bool(cfg.model.moe.num_experts and not there.moe.num_experts)
    if different := hf.model_differences(replace(there, moe=here.moe) if grows else there, here):
        raise ConfigError(
            f"run.init_from={name} has another model ({'; '.join(different[:3])}). Give this run the model keys of "
            f"its config.yaml, which `jaxstack import` writes for a Hugging Face folder."
        )
    cut = any(len(one.kinds) > 1 or parts[1:] for parts in here.expert_segments.values() for one in parts)
    if grows and cut and ctx.layout.pipeline is not None:  # the stages of the two models have other layers
        raise ConfigError(
            f"run.init_from={name} is up-cycled in the layers of model.moe.layers alone, which mesh.pipe="
            f"{cfg.mesh.pipe} cannot do. Take the first step with mesh.pipe=1, and resume with this mesh."
        )
    padding = cfg.model.pad_vocab_to
    if not isinstance(source, Config):
        with source:
            params = source.read_params(ctx, padding)
    else:
        masters = replace(source.train, qat="none")
        params = restore_params(replace(source, model=replace(source.model, pad_vocab_to=padding), train=masters), ctx)
    if grows:
        key = jax.random.key(cfg.run.seed)
        shardings = jax.tree.map(ctx.layout.sharding, ctx.layout.parameters(families.spec(here)))
        grow = jax.jit(lambda params: surgery.upcycle(there, params, cfg.model.moe, key)[1], out_shardings=shardings)
        params = grow(params)
    if cfg.optim.keep_zeros and not has_zeros(here, ctx, params):
        raise ConfigError(
            f"optim.keep_zeros=true, but the matrices of run.init_from={name} have no zeros. Name a run of `jaxstack "
            f"compress prune`, or use optim.keep_zeros=false."
        )
    state = make_state(Recipe.of(cfg), ctx, abstract)
    if there != source.model.base:
        params = encoder.with_other_head(source.model, params, cfg.model, state.params)
    if scores:
        params = {**params, reward_head.GROUP: state.params[reward_head.GROUP]}
    adapters: Params = {}
    if cfg.model.lora.rank:
        adapters, _ = parameters.partition(families.spec(cfg.model), state.params)
    if cfg.run.init_adapter is not None:
        adapters = _read_adapters(str(cfg.run.init_adapter), cfg.model, source, ctx)
    return start_from(cfg.model, state, parameters.combine(adapters, params))


def has_zeros(model: ModelConfig, ctx: Context, params: Params) -> bool:
    """Returns whether a matrix has a zero that is neither padding nor of a slot without a layer.

    The model and its parameters have no adapters.
    """
    spec = parameters.flat_spec(families.spec(model))

    def zeros(path: str, array: jax.Array) -> jax.Array:
        p = spec[path]
        if p.stacked and ctx.layout.stages is not None:
            array = array[ctx.layout.stages.of(path).layer_of_slot >= 0]
        stored = (array.shape[:1] if p.stacked else ()) + (p.unpadded or p.shape)[p.stacked :]
        return jnp.any(array[tuple(slice(size) for size in stored)] == 0)

    matrices = {path: array for path, array in flatten(params).items() if spec[path].kind == "matrix"}
    any_zero = jax.jit(lambda arrays: jnp.any(jnp.stack([zeros(*one) for one in arrays.items()])))(matrices)
    return bool(any_zero)


def _read_adapters(adapter: str, model: ModelConfig, source: Source, ctx: Context) -> Params:
    """Returns the adapters of `run.init_adapter`, which must have the shapes of `model.lora`."""
    name = f"run.init_adapter={adapter}"
    if not isinstance(source, PretrainedFolder):
        raise ConfigError(
            f"{name} needs a Hugging Face folder as run.init_from, not {_folder_of(source)}. Export that run with "
            f"`jaxstack export`, and name the folder."
        )
    saved = peft.read_adapters(Path(adapter), source.family, source.model)
    spec = families.spec(model)
    declared = parameters.flat_spec(parameters.partition(spec, spec)[0])
    sizes = (model.lora.rank, model.lora.alpha)
    if saved.values.keys() != declared.keys() or (saved.lora.rank, saved.lora.alpha) != sizes:
        raise ConfigError(
            f"{name} has other adapters than model.lora: rank={saved.lora.rank}, alpha={saved.lora.alpha:g}, "
            f"targets={list(saved.lora.targets)}. Set model.lora to these, or leave run.init_adapter null."
        )
    return peft.place(saved, source.model, ctx)


def open_teacher(cfg: Config, tokenizer: Tokenizer, mesh: jax.sharding.Mesh) -> Teach:
    """Reads the parameters of `distill.teacher`, and returns what adds what it says to batches; without one, nothing.

    It reads whole sequences, so devices of the axis `context` do the same work.

    Args:
      cfg: the resolved configuration of the run that learns.

    Raises:
      ConfigError: the teacher cannot be read, or it does not suit the run.
    """
    if cfg.distill.teacher is None:
        return lambda batch: batch
    model, params, ctx = read_frozen(cfg, "distill.teacher", cfg.distill.teacher, tokenizer, mesh)
    return without_gates(make_teach(cfg.distill, model, params, ctx.whole_sequences()), cfg.model)


def open_reference(cfg: Config, tokenizer: Tokenizer, mesh: jax.sharding.Mesh, ctx: Context) -> Refer:
    """Returns what adds the log-probabilities of the frozen reference to batches that are compared with one.

    For `preference.loss=kto` it also adds the divergence from the reference.

    The reference is `preference.reference` or `rl.reference`, or the model of `run.init_from`. A run that trains
    adapters of that model has its parameters already, and leaves the adapters out.

    Args:
      cfg: the resolved configuration of the run that learns.
      tokenizer: tokenizer of its data.
      mesh: its mesh.
      ctx: its execution context.

    Raises:
      ConfigError: the reference cannot be read, or it does not suit the run.
    """
    aim = cfg.aim
    if aim is None or not aim.has_reference:
        return lambda params, batch: batch
    if aim.reference is None and cfg.model.lora.rank and cfg.run.init_adapter is None:
        refer = make_refer(replace(cfg.model.base, dropout=0.0), ctx.whole_sequences())
    else:
        group = "rl" if cfg.learned_rewards else "preference"
        key = "run.init_from" if aim.reference is None else f"{group}.reference"
        name = aim.reference or str(cfg.run.init_from)
        model, params, there = read_frozen(cfg, key, name, tokenizer, mesh)
        refer = make_refer(model, there.whole_sequences(), params)
    if isinstance(aim, PreferenceConfig) and aim.loss == "kto":
        return with_divergence(refer, replace(cfg.model, dropout=0.0), ctx.whole_sequences())
    return refer


def _require_same_task(name: str, model: ModelConfig, cfg: Config) -> None:
    """Checks that a frozen model predicts what a run learns, from the arrays that the run's batches have.

    Args:
      name: what names the model, for errors: `distill.teacher=DIR`.
      model: the frozen model.
      cfg: the resolved configuration of the run.

    Raises:
      ConfigError: it does not.
    """
    if model.family != cfg.model.family:
        raise ConfigError(
            f"{name} has model.family={model.family}, but the run has model.family={cfg.model.family}. Name a run of "
            f"the same family: both must predict the same from the same batch."
        )
    tasks = {
        "labels": lambda one: (one.labels, one.label_each),
        "sentences": lambda one: one.sentences.tasks,
        "token_types": lambda one: bool(one.token_types),
        "diffusion.patch_size": lambda one: (one.diffusion.patch_values, one.diffusion.num_patches),
        "diffusion.path": lambda one: one.diffusion.path,
        "diffusion.text_layers": lambda one: bool(one.diffusion.text_layers),
        "moe.max_timestep": lambda one: one.moe.max_timestep,
    }
    own = [key for key in tasks if "diffusion" in key or "timestep" in key]
    for key in own if model.family == "diffusion" else [key for key in tasks if key not in own]:
        if (there := tasks[key](model)) != (here := tasks[key](cfg.model)):
            raise ConfigError(
                f"{name} has model.{key}={there}, and this run has {here}, so that they predict different things. Use "
                f"equal values."
            )
    if model.moe.num_experts and model.moe.router == "domain":
        if len(cfg.data.domains) != model.moe.num_experts:
            raise ConfigError(
                f"{name} has {plural(model.moe.num_experts, 'expert')} by domain, but data.domains has "
                f"{plural(len(cfg.data.domains), 'pattern')}. Set data.domains as in that run."
            )
    elif cfg.data.domains and not cfg.model.moe.num_experts:
        raise ConfigError(
            f"data.domains={list(cfg.data.domains)} chooses experts, but neither the run nor {name} has experts by "
            f"domain. Leave data.domains out."
        )
    if model.moe.num_experts and model.moe.router == "timestep" and model.family != "diffusion":
        raise ConfigError(f"{name} has model.moe.router=timestep without timesteps. Name another model.")


def read_frozen(
    cfg: Config, key: str, folder: str, tokenizer: Tokenizer, mesh: jax.sharding.Mesh
) -> tuple[ModelConfig, Params, Context]:
    """Returns a model that a run reads and does not change: model, parameters and execution context.

    Its parameters are sharded over the mesh by the rules of their own model, in the dtype of the run. They belong to no
    checkpoint.

    Args:
      cfg: the resolved configuration of the run.
      key: the key that names the model, for errors.
      folder: run or Hugging Face folder.
      tokenizer: tokenizer of the run's data.
      mesh: mesh of the run.

    Raises:
      ConfigError: the model cannot be read, or it does not suit the run.
    """
    name = f"{key}={folder}"
    source = find_source(folder, key)
    require_same_tokenizer(source, name, cfg.data, tokenizer)
    model = replace(source.model, pad_vocab_to=cfg.model.pad_vocab_to)
    _require_same_task(name, model, cfg)
    if model.vocab_size != cfg.model.vocab_size:
        raise ConfigError(
            f"{name} has model.vocab_size={model.vocab_size}, and this run has {cfg.model.vocab_size}. Name a model "
            f"with the same tokenizer."
        )
    longest = max(cfg.data.seq_len, cfg.data.target_length if model.family == "encoder_decoder" else 0)
    if model.positions == "learned" and model.family != "diffusion" and (model.max_positions or 0) < longest:
        raise ConfigError(
            f"{name} has learned positions up to {model.max_positions}, but rows have {plural(longest, 'token')}. "
            f"Shorten data.seq_len, or name another model."
        )
    # The head of a reward model is small and whole on each device: the rest determines the context.
    shape = replace(model, dropout=0.0, reward_head=False)
    run = replace(cfg.with_model(shape), optim=replace(cfg.optim, ema=None), pipeline=PipelineConfig())
    ctx = make_context(run, mesh)
    if not isinstance(source, Config):
        with source:
            params = source.read_params(ctx, cfg.model.pad_vocab_to)
    else:
        train = replace(run.train, qat=source.train.qat, qat_group=source.train.qat_group)
        if model.reward_head:
            there = replace(source, mesh=run.mesh, pipeline=run.pipeline, model=model)
        else:
            there = replace(run, run=replace(run.run, dir=source.run.dir), optim=source.optim, train=train, model=model)
        params = restore_params(there, ctx)
    return replace(model.base, dropout=0.0), params, ctx
