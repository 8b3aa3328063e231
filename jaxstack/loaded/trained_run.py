"""A loaded run: its configuration, parameters and tokenizer, and what can be done with its model."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, overload

import jax
import numpy as np
from jax.sharding import PartitionSpec
from numpy.typing import ArrayLike

from jaxstack import data, families, sharding
from jaxstack.checkpoint import manifest, run_dir, store
from jaxstack.common.counts import plural
from jaxstack.common.tree import Batch
from jaxstack.config import Config, ConfigError, DataConfig, ModelConfig, SampleConfig
from jaxstack.config.training import PreferenceConfig, RLConfig
from jaxstack.data import Tokenizer, chat
from jaxstack.data.conversations import Message
from jaxstack.data.loader import DataLoader
from jaxstack.data.preferences import scored_ids
from jaxstack.data.text_stream import TextStream
from jaxstack.data.tokenizers import encode_prompt
from jaxstack.families.context import make_context
from jaxstack.generate import captions, decode, features, pictures, translate
from jaxstack.generate.engine import Engine, GenerateOptions
from jaxstack.generate.exact import Exact, Rollout
from jaxstack.generate.prompts import Rows, check_prompts, require_decoder
from jaxstack.generate.rollouts import Rollouts
from jaxstack.generate.score import Scorer
from jaxstack.generate.speculative import Speculation
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.models.params import Params
from jaxstack.tracking.step_log import mean_losses
from jaxstack.training.assemble import make_eval_step, objective_of
from jaxstack.training.features import qat
from jaxstack.training.losses import EvalSums
from jaxstack.training.services import init_from
from jaxstack.training.setup import Setup
from jaxstack.training.state import Recipe, abstract_state


class Evaluation(NamedTuple):
    """A held-out loss.

    Attributes:
      loss: the held-out loss in nats per token.
      bits_per_byte: the held-out loss in bits per byte of text; NaN if the tokenizer does not keep the complete text.
      sources: the loss of each source in nats per token, by its name.
    """

    loss: float
    bits_per_byte: float
    sources: dict[str, float]


class Draft(NamedTuple):
    """The source of draft tokens, which the model then checks: see `generate.speculative`.

    Attributes:
      run: a small model, on the same mesh and with the same tokenizer. `None` means the model's own module
        (`model.mtp.depth`).
      tokens: number of tokens that are drafted in each round.
    """

    run: "TrainedRun | None" = None
    tokens: int = 4


@dataclass(frozen=True, eq=False, repr=False)
class TrainedRun:
    """A run that was loaded; `jaxstack.load` returns it.

    Attributes:
      config: configuration of the run, on the mesh that was asked for.
      params: float32 parameters with adapters merged, sharded over the mesh; `model` declares them. With `train.qat`
        they are the rounded parameters.
      tokenizer: the tokenizer of the run.
      context: how the model is computed.
      step: step of the checkpoint that was asked for. `None` means the newest valid one.
    """

    config: Config
    params: Params
    tokenizer: Tokenizer
    context: Context
    step: int | None = None

    def __repr__(self) -> str:
        devices = 1 if self.context.layout.mesh is None else self.context.layout.mesh.size
        count = plural(params.count(families.spec(self.model)), "parameter", spec=",")
        return f"TrainedRun({self.config.run.dir}: {count} on {devices} x {jax.devices()[0].device_kind})"

    @classmethod
    def open(cls, path: Path, cfg: Config, tokenizer: Tokenizer, step: int | None) -> "TrainedRun":
        """Reads the parameters of a checkpoint. If the run has none, it reads the parameters that the run starts with.

        Args:
          path: run directory.
          cfg: its configuration, on the mesh to use.
          step: step of the checkpoint. `None` means the newest valid one.

        Raises:
          ConfigError: the checkpoint is damaged, or the mesh does not fit the model or the devices.
        """
        devices = sharding.find_devices()
        needed = math.prod(cfg.mesh.sizes.values())
        if cfg.mesh.open_axis is None:  # the other devices of the machine are not needed
            devices = devices[:needed]
            if len(devices) < needed:
                shown = " x ".join(f"mesh.{axis}={size}" for axis, size in cfg.mesh.sizes.items() if size > 1)
                raise ConfigError(
                    f"{shown} needs {plural(needed, 'device')}, but JAX has {len(devices)}. Use a smaller mesh; on a "
                    f"CPU, load the run before JAX is used, or set JAX_NUM_CPU_DEVICES={needed} before Python starts."
                )
        ctx = make_context(cfg, sharding.make_mesh(cfg.mesh, cfg.microbatch_size, devices))
        if manifest.steps(run_dir.checkpoints(path)):
            cfg = replace(cfg, run=replace(cfg.run, dir=str(path)))
            return cls(cfg, init_from.restore_params(cfg, ctx, step), tokenizer, ctx, step)
        # A run that has not begun has the parameters of its source, whose model may have no adapters, or other ones.
        source = init_from.find_source(str(path), "RUN")
        if not isinstance(source, Config):
            with source:
                values = source.read_params(ctx, cfg.model.pad_vocab_to)
                return cls(cfg, qat.round_arrays(cfg.model.base, cfg.train.rounding, values), tokenizer, ctx)
        model = replace(source.model, pad_vocab_to=cfg.model.pad_vocab_to)
        cfg = replace(cfg, run=replace(cfg.run, dir=source.run.dir), model=model)
        return cls(cfg, init_from.restore_params(cfg, ctx, step), tokenizer, ctx, step)

    @property
    def model(self) -> ModelConfig:
        """The model of `params`: the model of the run without adapters."""
        return self.config.model.base

    def draw(self, classes: Sequence[str], *, seed: int | None = None, **sample: float) -> np.ndarray:
        """Returns pictures [N, H, W, C] with values from -1 to 1 of a diffusion model, given the class or text of each.

        Args:
          classes: names of classes, or texts if the model reads them.
          seed: seed of the noise. `None` means `run.seed` of the run.
          sample: `steps` and `guidance` in place of the run's, see `SampleConfig`.

        Raises:
          ConfigError: the model does not make pictures, a class does not exist, or a text is too long.
        """
        if self.model.family != "diffusion":
            raise ConfigError(f"model.family={self.model.family} does not make pictures. Use generate for text.")
        options = replace(self.config.sample, **sample)  # type: ignore[arg-type]
        given = pictures.Given.named(self.model, classes, self.tokenizer, self.config.data)
        made = pictures.make_draw(self.model, options, self.context)
        return made(self.params, given, self._seed(seed))

    def features(self, given: np.ndarray | Sequence[str]) -> np.ndarray:
        """Returns the features of pictures or of texts, float32 [N, E], by a contrastive model.

        Each has length 1. The product of the features of a picture with the features of a text is the cosine that the
        model compares.

        Args:
          given: pictures [N, H, W, C] with values from -1 to 1, or texts.

        Raises:
          ConfigError: the model has no features, the pictures are not of its size, or a text is too long.
        """
        if self.model.family != "contrastive":
            raise ConfigError(f"model.family={self.model.family} has no features. Use a run with family=contrastive.")
        if isinstance(given, np.ndarray):
            return features.image_features(self.model, self.params, given, self.context)
        length = self.config.data.target_length
        return features.text_features(self.model, self.params, given, self.tokenizer, length, self.context)

    def captions(
        self, pixels: np.ndarray, beginnings: Sequence[str] | None = None, *, seed: int | None = None, **sample: float
    ) -> list[str]:
        """Returns the caption that the language branch of a contrastive model writes for each picture.

        Args:
          pixels: pictures [N, H, W, C] with values from -1 to 1.
          beginnings: how each caption begins, which may choose its language. `None` means that nothing is given.
          seed: seed of sampling. `None` means `run.seed`.
          **sample: keys of the group `sample`, see `generate`.

        Raises:
          ConfigError: the model writes no captions, the pictures are not of its size, or a beginning is too long.
        """
        longest = self.config.data.target_length
        write = captions.make_captions(self.model, self.sample_with(sample), self.tokenizer, longest, self.context)
        begin = [""] * len(pixels) if beginnings is None else beginnings
        return write(self.params, pixels, begin, self._seed(seed))

    def translate(
        self, texts: Sequence[str], *, language: str | None = None, seed: int | None = None, **sample: float
    ) -> list[str]:
        """Returns what an encoder-decoder writes for each text: translations, or hidden spans.

        Args:
          texts: what the encoder reads.
          language: the language to write, if the run has several.
          seed: seed of sampling. `None` means `run.seed`.
          **sample: keys of the group `sample`, see `generate`.

        Raises:
          ConfigError: the model is not an encoder-decoder, or the language is missing or unknown.
        """
        if self.model.family != "encoder_decoder":
            raise ConfigError(f"model.family={self.model.family} reads and writes one text. Use generate.")
        data = self.config.data
        special = translate.special_ids(data, self.tokenizer)
        gate = translate.gate_of(data, language) if self.model.moe.num_experts else None
        write = translate.make_translate(
            self.model, self.sample_with(sample), start=special.start, stop=(special.eos,), gate=gate, ctx=self.context
        )
        inputs = translate.to_inputs(data, self.tokenizer, texts, language)
        rows = write(self.params, inputs, self._seed(seed))
        return [translate.to_text(data, self.tokenizer, row) for row in rows]

    @overload
    def generate(
        self,
        prompts: str,
        *,
        seed: int | None = None,
        stop: Sequence[int] = (),
        draft: "Draft | None" = None,
        **sample: float,
    ) -> str: ...

    @overload
    def generate(
        self,
        prompts: list[str],
        *,
        seed: int | None = None,
        stop: Sequence[int] = (),
        draft: "Draft | None" = None,
        **sample: float,
    ) -> list[str]: ...

    def generate(
        self,
        prompts: str | list[str],
        *,
        seed: int | None = None,
        stop: Sequence[int] = (),
        draft: "Draft | None" = None,
        **sample: float,
    ) -> str | list[str]:
        """Returns a prompt with its continuation, or a list of them for a list of prompts.

        Args:
          prompts: a text, or several that are continued at the same time.
          seed: seed of sampling. `None` means `run.seed`.
          stop: ids of tokens that end a text; the end of a document always ends it.
          draft: the source of draft tokens, see `Draft`. Texts are then written one after the other.
          **sample: keys of the group `sample` of the configuration, such as `tokens=100, temperature=0.7`. The others
            have the run's values.

        Raises:
          ConfigError: a value is out of range, a prompt is empty, or the text is longer than learned positions.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        streams = [TextStream(self.tokenizer, text) for text in texts]
        prompt_ids = [stream.prompt for stream in streams]
        for parts in self.stream_tokens(prompt_ids, seed=seed, stop=stop, draft=draft, at_once=True, **sample):
            for stream, part in zip(streams, parts, strict=True):
                stream.add(part)
        complete = [stream.text for stream in streams]
        return complete[0] if isinstance(prompts, str) else complete

    def stream(
        self, prompt: str, *, seed: int | None = None, stop: Sequence[int] = (), **sample: float
    ) -> Iterator[str]:
        """Yields the text of `generate` in pieces, as its tokens come. The first piece is the prompt.

        Args:
          prompt: a text.
          seed: see `generate`.
          stop: see `generate`.
          **sample: see `generate`.
        """
        text = TextStream(self.tokenizer, prompt)
        yield text.take()
        parts = self.stream_tokens([text.prompt], seed=seed, stop=stop, draft=None, at_once=False, **sample)
        for (part,) in parts:
            text.add(part)
            if piece := text.take():
                yield piece
        if rest := text.take(all=True):
            yield rest

    def stream_tokens(
        self,
        prompts: Rows,
        *,
        seed: int | None = None,
        stop: Sequence[int] = (),
        draft: "Draft | None" = None,
        at_once: bool = False,
        **sample: float,
    ) -> Iterator[Rows]:
        """Yields the tokens that are added to each prompt, a few at a time. With beams there is one part, at the end.

        Args:
          prompts: token ids of each prompt.
          seed: see `generate`.
          stop: see `generate`.
          draft: see `generate`.
          at_once: see `decode.stream`.
          **sample: see `generate`.
        """
        require_decoder(self.model)
        how = self.sample_with(sample)
        seed = self._seed(seed)
        stop = self._stop(stop)
        if draft is not None:
            small = None if draft.run is None else self._small_model(draft.run, how.domain)
            work = Speculation(self.engine(how.domain), small, draft.tokens)
            yield from work.stream_rows(prompts, how, stop=stop, seed=seed, at_once=at_once)
            return
        if how.beams == 1:
            yield from decode.stream(self.engine(how.domain), prompts, how, stop=stop, seed=seed, at_once=at_once)
            return
        options = self._options(how.domain) | {"stop": stop}
        rows = decode.generate(self.model, self.params, prompts, how, seed=seed, **options)
        yield [row[len(prompt) :] for prompt, row in zip(prompts, rows, strict=True)]

    def _small_model(self, run: "TrainedRun", domain: int) -> Engine:
        """Returns a run ready to draft for this one."""
        if not data.same_vocabulary(self.tokenizer.to_json(), run.tokenizer.to_json()):
            raise ConfigError(
                f"the draft {run.config.run.dir} has the tokenizer {run.tokenizer.name}, whose ids are not those of "
                f"{self.tokenizer.name}. Draft with a run of the same tokenizer."
            )
        return run.engine(domain)

    def rollout(
        self,
        prompts: Rows,
        *,
        seed: int | None = None,
        stop: Sequence[int] = (),
        rows: int = 8,
        **sample: float,
    ) -> list[Rollout]:
        """Returns a text for each prompt, with the log-probabilities of `losses.sequence_log_probs`, bit for bit.

        Args:
          prompts: ids of each prompt.
          seed: see `generate`.
          stop: see `generate`.
          rows: number of texts in a call.
          **sample: see `generate`.

        Raises:
          ConfigError: see `generate`; or a repetition penalty or beams, which depend on more than logits.
        """
        how = self.sample_with(sample)
        work = Exact(self.scorer, self.engine(how.domain), how, self._stop(stop), rows)
        return work.texts(prompts, self._seed(seed))

    def _options(self, domain: int) -> GenerateOptions:
        """Returns the options of generation for texts of a domain."""
        return decode.generate_options(self.model, domain, self.tokenizer, self.context)

    def _stop(self, stop: Sequence[int]) -> tuple[int, ...]:
        """Returns the tokens that end a text: these, and the end of a document."""
        return (*stop, *self.tokenizer.stop_ids)

    def _seed(self, seed: int | None) -> int:
        """Returns a seed; `None` means `run.seed`."""
        return self.config.run.seed if seed is None else seed

    def engine(self, domain: int = 0) -> Engine:
        """Returns the model ready to generate; its programs are compiled once.

        Args:
          domain: domain of the texts, for `model.moe.router=domain`.
        """
        if domain not in self._engines:
            self._engines[domain] = Engine.create(self.model, self.params, **self._options(domain))
        return self._engines[domain]

    def sample_with(self, given: dict[str, float]) -> SampleConfig:
        """Returns how tokens are chosen: keys of the group `sample`, and the run's values of the others."""
        known = [f.name for f in fields(SampleConfig) if f.name != "prompts"]
        if unknown := sorted(given.keys() - set(known)):
            raise ConfigError(f"{unknown[0]} is not an option of generation. Use {', '.join(known)}.")
        return replace(self.config.sample, prompts=None, **given)  # type: ignore[arg-type]

    def logits(self, text: str | ArrayLike) -> np.ndarray:
        """Returns the logits of the token after each token of a text, float32 [S, V].

        Experts have no capacity limit here, as in generation.

        Args:
          text: a text, its ids [S], or several rows of ids [B, S], which give [B, S, V].

        Raises:
          ConfigError: there are no tokens, an id does not exist, or there are more tokens than learned positions.
        """
        ids = np.asarray(encode_prompt(self.tokenizer, text) if isinstance(text, str) else text)
        if not np.issubdtype(ids.dtype, np.integer) or ids.ndim not in (1, 2):
            raise ConfigError(f"ids are {ids.dtype} of shape {ids.shape}. Give a text, or integers [S] or [B, S].")
        rows = ids.reshape(-1, ids.shape[-1]).astype(np.int64)
        check_prompts(self.model, rows.tolist(), 0, self.model.vocab)
        found = self.scorer.logits(rows)
        return found[0] if ids.ndim == 1 else found

    def score(self, text: str | ArrayLike) -> np.ndarray:
        """Returns the log-probability in nats of each token of a text but the first, float32 [S - 1].

        Args:
          text: a text, or its ids [S].

        Raises:
          ConfigError: there are fewer than two tokens, an id does not exist, or there are more tokens than learned
            positions.
        """
        ids = encode_prompt(self.tokenizer, text) if isinstance(text, str) else np.asarray(text).tolist()
        ((_, found),) = self.scorer.scores([ids], rows=1)
        return found.log_probs

    def evaluate(self, source: DataConfig | None = None) -> Evaluation:
        """Returns the held-out loss.

        On the mesh of the training it equals the loss that the run has logged for this checkpoint, bit for bit. The
        loss of a run with adapters differs by rounding, since adapters are merged here.

        Args:
          source: other data, of which the held-out part is evaluated. `None` means the data of the run.

        Raises:
          ConfigError: the data cannot be read, has changed since the checkpoint, or has another tokenizer.
        """
        cfg = self.config if source is None else self._with_data(source)
        dataset = data.load_for(cfg.model, cfg.data, cfg.aim)
        saved = run_dir.checkpoints(Path(cfg.run.dir))
        if source is None and (steps := manifest.complete_steps(saved)):
            metadata = store.metadata(saved, max(steps) if self.step is None else self.step)
            run_dir.require_same_data(metadata, cfg.data, dataset.fingerprint, cfg.run.dir)
        if not data.same_vocabulary(dataset.tokenizer.to_json(), self.tokenizer.to_json()):
            raise ConfigError(
                f"the data was read with the tokenizer {dataset.tokenizer.name}, which has other ids than that of the "
                f"run. Use data.tokenizer={self.tokenizer.name}."
            )
        rows = PartitionSpec() if cfg.learned_rewards else self.context.layout.batch
        loader = DataLoader(cfg, dataset, self.context.layout.sharding(rows))
        mesh = self.context.layout.mesh
        assert mesh is not None, "a run is loaded onto a mesh"
        # The adapters of the run are merged here, so its reference is read again.
        refer = init_from.open_reference(cfg.with_model(self.model), self.tokenizer, mesh, self.context)
        if cfg.learned_rewards is not None:
            setup = Setup(cfg, dataset, mesh, self.context, abstract_state(Recipe.of(cfg), self.context))
            step = Rollouts.create(setup, loader).evaluator(refer)
        else:
            compiled = self._eval_step(cfg.learned_preference)

            def step(params: Params, batch: Batch) -> EvalSums:
                return compiled(params, refer(params, batch))

        losses = {}
        for one in loader.held_out:
            sums = (step(self.params, loader.to_devices(batch)) for batch in one.local_batches)
            losses[one.name] = mean_losses(cfg.objective.terms, sums, lambda: None).loss
        loss = loader.mean_loss(losses)
        return Evaluation(loss, loss / math.log(2) / loader.held_out_bytes_per_token, losses)

    def _with_data(self, source: DataConfig) -> Config:
        """Returns the configuration with other data; keys for pairs or prompts are left out if it has none."""
        there = {one.source for one in source.single_sources()}
        preference = self.config.preference if "preferences" in there else PreferenceConfig()
        rl = self.config.rl if "prompts" in there else RLConfig()
        return replace(self.config, data=source, preference=preference, rl=rl)

    @cached_property
    def _engines(self) -> dict[int, Engine]:
        return {}

    def _eval_step(self, preference: PreferenceConfig | None) -> Callable[[Params, Batch], EvalSums]:
        """Returns the step that evaluates likelihood, or how well a run learned from pairs of completions."""
        if preference not in self._eval_steps:
            objective = objective_of(self.model, preference)
            step = make_eval_step(self.model, self.context, self.config.train.grad_accum, objective)
            self._eval_steps[preference] = jax.jit(step)
        return self._eval_steps[preference]

    @cached_property
    def _eval_steps(self) -> dict[PreferenceConfig | None, Callable[[Params, Batch], EvalSums]]:
        return {}

    def rewards(self, rows: Sequence[tuple[list[Message], str]], batch: int = 8) -> np.ndarray:
        """Returns the scores that a reward model gives to completions, float32 [rows].

        Args:
          rows: each a prompt, as messages, and the text of a completion.
          batch: number of completions in a call.

        Raises:
          ConfigError: the run is not a reward model.
        """
        if not self.model.reward_head:
            raise ConfigError(
                f"{self.config.run.dir} is not a reward model (model.reward_head=false). Name a run of "
                f"preference.loss=reward."
            )
        return self.scorer.rewards(scored_ids(rows, chat.template_for(self.tokenizer), self.tokenizer), batch)

    @cached_property
    def scorer(self) -> Scorer:
        """The model ready to score texts."""
        require_decoder(self.model, scores=True)
        return Scorer.create(self.model, self.params, self.context, self._options(self.config.sample.domain)["gate"])
