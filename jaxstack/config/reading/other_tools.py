"""What keys of other training programs are called here. `docs/coming_from.md` has the same rows; a test compares them.

A row is the name there and the key here. `KEY=VALUE` is a key with the value to use. A pair adds how to convert a value
that does not mean the same; names without it take the same value.
"""

from typing import NamedTuple

_BATCH = "It counts the sequences of an optimizer step: sequences per device x devices x accumulation steps"
_MICRO = "It counts the sequences of an optimizer step: batch_size x processes x accumulation steps"
_EPOCHS = "It counts optimizer steps: epochs x sequences of the data / data.batch_size"
_FRACTION = "It is a fraction of the peak: divide by the peak learning rate"
_WARMUP = "It counts steps: multiply the fraction by train.steps"
_SINKS = "It is a list, such as [tensorboard, wandb]"
_DTYPE = "Use float32 or bfloat16"
_REMAT = "Use none, selective, dots or full"
_SPAN = "Give the steps to trace, such as 10:15"

TOOLS: dict[str, dict[str, str | tuple[str, str]]] = {
    "nanoGPT": {
        "n_layer": "model.num_layers",
        "n_head": "model.num_heads",
        "n_embd": "model.d_model",
        "dropout": "model.dropout",
        "bias": "model.bias",
        "block_size": "data.seq_len",
        "batch_size": ("data.batch_size", _MICRO),
        "gradient_accumulation_steps": "train.grad_accum",
        "max_iters": "train.steps",
        "lr_decay_iters": "train.steps",
        "learning_rate": "optim.lr",
        "min_lr": ("optim.final_lr_fraction", _FRACTION),
        "warmup_iters": "optim.warmup_steps",
        "beta1": "optim.b1",
        "beta2": "optim.b2",
        "weight_decay": "optim.weight_decay",
        "grad_clip": "optim.clip_norm",
        "eval_interval": "train.eval_every",
        "eval_iters": "train.eval_steps",
        "log_interval": "run.log_every",
        "out_dir": "run.dir",
        "dtype": ("train.dtype", _DTYPE),
        "dataset": ("data.path", "Give the path of a text or of a token file, with data.source"),
        "always_save_checkpoint": ("checkpoint.every", "checkpoint.keep_best keeps the best ones too"),
        "wandb_log": "run.sinks=[wandb]",
        "start": ("sample.prompts", "Give a list of texts"),
        "max_new_tokens": "sample.tokens",
        "temperature": "sample.temperature",
    },
    "MaxText": {
        "base_emb_dim": "model.d_model",
        "base_num_decoder_layers": "model.num_layers",
        "base_mlp_dim": "model.d_ff",
        "base_num_query_heads": "model.num_heads",
        "base_num_kv_heads": "model.num_kv_heads",
        "head_dim": "model.head_dim",
        "rope_max_timescale": "model.rope_theta",
        "max_target_length": "data.seq_len",
        "per_device_batch_size": ("data.batch_size", _BATCH),
        "gradient_accumulation_steps": "train.grad_accum",
        "steps": "train.steps",
        "learning_rate": "optim.lr",
        "warmup_steps_fraction": ("optim.warmup_steps", _WARMUP),
        "lr_schedule_type": ("optim.schedule", "Use cosine, wsd, linear or constant"),
        "opt_type": ("optim.name", "Use adamw, muon, adafactor, lion or sgd"),
        "adam_b1": "optim.b1",
        "adam_b2": "optim.b2",
        "adam_weight_decay": "optim.weight_decay",
        "gradient_clipping_threshold": "optim.clip_norm",
        "ici_data_parallelism": "mesh.data",
        "ici_fsdp_parallelism": "mesh.fsdp",
        "ici_expert_parallelism": "mesh.expert",
        "ici_tensor_parallelism": "mesh.tensor",
        "ici_tensor_sequence_parallelism": "mesh.tensor",
        "ici_context_parallelism": "mesh.context",
        "ici_pipeline_parallelism": "mesh.pipe",
        "num_pipeline_microbatches": "pipeline.microbatches",
        "num_pipeline_repeats": "pipeline.chunks",
        "remat_policy": ("train.remat", _REMAT),
        "attention": ("kernels.attention", "Use auto, xla, chunked, cudnn or pallas"),
        "num_experts": "model.moe.num_experts",
        "num_experts_per_tok": "model.moe.top_k",
        "capacity_factor": ("model.moe.capacity_factor", "Use null in place of -1"),
        "load_balance_loss_weight": "model.moe.aux_loss_weight",
        "routed_bias_update_rate": "model.moe.bias_update_rate",
        "dtype": ("train.dtype", _DTYPE),
        "base_output_directory": ("run.dir", "It is the directory of one run"),
        "run_name": ("run.dir", "It is a directory, such as runs/first"),
        "load_parameters_path": ("run.init_from", "Name a run or a Hugging Face folder"),
        "checkpoint_period": "checkpoint.every",
        "eval_interval": "train.eval_every",
        "log_period": "run.log_every",
        "dataset_type": ("data.source", "Use stdlib, path, tokens, hf or chat"),
        "dataset_path": "data.path",
        "tokenizer_path": ("data.tokenizer", "Give the path of a tokenizer.json, bytes or chars"),
        "packing": "data.packing",
        "data_shuffle_seed": "run.seed",
        "init_weights_seed": "run.seed",
        "profiler": ("profile.steps", _SPAN),
        "use_sft": "data.source=chat",
        "sft_train_on_completion_only": "data.source=chat",
    },
    "torchtitan": {
        "training.local_batch_size": ("data.batch_size", _BATCH),
        "training.global_batch_size": "data.batch_size",
        "training.seq_len": "data.seq_len",
        "training.steps": "train.steps",
        "training.max_norm": "optim.clip_norm",
        "training.mixed_precision_param": ("train.dtype", _DTYPE),
        "training.mixed_precision_reduce": ("train.reduce_dtype", _DTYPE),
        "training.dataset_path": "data.path",
        "parallelism.data_parallel_replicate_degree": "mesh.data",
        "parallelism.data_parallel_shard_degree": "mesh.fsdp",
        "parallelism.tensor_parallel_degree": "mesh.tensor",
        "parallelism.context_parallel_degree": "mesh.context",
        "parallelism.context_parallel_rotate_method": ("mesh.context_method", "Use ring or all_gather"),
        "parallelism.pipeline_parallel_degree": "mesh.pipe",
        "parallelism.pipeline_parallel_schedule": ("pipeline.schedule", "Use gpipe, 1f1b or interleaved_1f1b"),
        "parallelism.pipeline_parallel_microbatch_size": (
            "pipeline.microbatches",
            "It counts microbatches: sequences per replica / microbatch size",
        ),
        "parallelism.pipeline_parallel_split_points": ("pipeline.partition", "Use even, auto, or a file of costs"),
        "parallelism.expert_parallel_degree": "mesh.expert",
        "optimizer.name": ("optim.name", "Use adamw, muon, adafactor, lion or sgd"),
        "optimizer.lr": "optim.lr",
        "lr_scheduler.warmup_steps": "optim.warmup_steps",
        "lr_scheduler.decay_ratio": ("optim.decay_fraction", "It applies with optim.schedule=wsd"),
        "lr_scheduler.min_lr_factor": "optim.final_lr_fraction",
        "activation_checkpoint.mode": ("train.remat", _REMAT),
        "checkpoint.folder": ("run.dir", "Checkpoints are in the folder checkpoints of the run directory"),
        "checkpoint.interval": "checkpoint.every",
        "checkpoint.keep_latest_k": "checkpoint.keep",
        "checkpoint.initial_load_path": ("run.init_from", "Name a run or a Hugging Face folder"),
        "metrics.log_freq": "run.log_every",
        "metrics.enable_tensorboard": "run.sinks=[tensorboard]",
        "metrics.enable_wandb": "run.sinks=[wandb]",
        "profiling.enable_profiling": ("profile.steps", _SPAN),
        "profiling.profile_freq": ("profile.steps", _SPAN),
        "comm.init_timeout_seconds": "distributed.timeout_s",
    },
    "Hugging Face": {
        "num_hidden_layers": "model.num_layers",
        "hidden_size": "model.d_model",
        "intermediate_size": "model.d_ff",
        "num_attention_heads": "model.num_heads",
        "num_key_value_heads": "model.num_kv_heads",
        "rms_norm_eps": "model.norm_eps",
        "hidden_act": ("model.activation", "Use silu, gelu, gelu_tanh or relu2"),
        "tie_word_embeddings": "model.tied_embeddings",
        "max_position_embeddings": "model.max_positions",
        "per_device_train_batch_size": ("data.batch_size", _BATCH),
        "gradient_accumulation_steps": "train.grad_accum",
        "max_length": "data.seq_len",
        "max_seq_length": "data.seq_len",
        "max_steps": "train.steps",
        "num_train_epochs": ("train.steps", _EPOCHS),
        "learning_rate": "optim.lr",
        "warmup_steps": "optim.warmup_steps",
        "warmup_ratio": ("optim.warmup_steps", _WARMUP),
        "lr_scheduler_type": ("optim.schedule", "Use cosine, wsd, linear or constant"),
        "optim": ("optim.name", "Use adamw, muon, adafactor, lion or sgd"),
        "adam_beta1": "optim.b1",
        "adam_beta2": "optim.b2",
        "adam_epsilon": "optim.eps",
        "weight_decay": "optim.weight_decay",
        "max_grad_norm": "optim.clip_norm",
        "bf16": "train.dtype=bfloat16",
        "gradient_checkpointing": "train.remat=full",
        "packing": "data.packing",
        "eval_steps": "train.eval_every",
        "logging_steps": "run.log_every",
        "save_steps": "checkpoint.every",
        "save_total_limit": "checkpoint.keep",
        "output_dir": "run.dir",
        "model_name_or_path": ("run.init_from", "Name a Hugging Face folder on this machine, see `jaxstack import`"),
        "dataset_name": ("data.path", "Add --data.source=hf"),
        "dataset_text_field": "data.hf_column",
        "report_to": ("run.sinks", _SINKS),
        "seed": "run.seed",
        "lora_r": "model.lora.rank",
        "lora_alpha": "model.lora.alpha",
        "lora_target_modules": ("model.lora.targets", "Give regular expressions of parameter names of jaxstack"),
    },
    "Megatron-LM": {
        "num_layers": "model.num_layers",
        "hidden_size": "model.d_model",
        "ffn_hidden_size": "model.d_ff",
        "num_attention_heads": "model.num_heads",
        "num_query_groups": "model.num_kv_heads",
        "kv_channels": "model.head_dim",
        "rotary_base": "model.rope_theta",
        "swiglu": "model.gated",
        "seq_length": "data.seq_len",
        "micro_batch_size": (
            "data.batch_size",
            "It counts the sequences of an optimizer step: micro batch x data parallel size x accumulation steps",
        ),
        "global_batch_size": "data.batch_size",
        "train_iters": "train.steps",
        "lr": "optim.lr",
        "min_lr": ("optim.final_lr_fraction", _FRACTION),
        "lr_warmup_iters": "optim.warmup_steps",
        "lr_decay_style": ("optim.schedule", "Use cosine, wsd, linear or constant"),
        "clip_grad": "optim.clip_norm",
        "bf16": "train.dtype=bfloat16",
        "recompute_granularity": ("train.remat", _REMAT),
        "tensor_model_parallel_size": "mesh.tensor",
        "pipeline_model_parallel_size": "mesh.pipe",
        "context_parallel_size": "mesh.context",
        "expert_model_parallel_size": "mesh.expert",
        "sequence_parallel": "mesh.sequence_parallel",
        "num_layers_per_virtual_pipeline_stage": (
            "pipeline.chunks",
            "It counts chunks per stage: layers per stage / layers per chunk",
        ),
        "moe_router_topk": "model.moe.top_k",
        "moe_aux_loss_coeff": "model.moe.aux_loss_weight",
        "data_path": "data.path",
        "eval_interval": "train.eval_every",
        "eval_iters": "train.eval_steps",
        "log_interval": "run.log_every",
        "save": ("run.dir", "Checkpoints are in the folder checkpoints of the run directory"),
        "save_interval": "checkpoint.every",
        "load": ("run.init_from", "A run in run.dir resumes by itself"),
    },
    "Levanter": {
        "hidden_dim": "model.d_model",
        "intermediate_dim": "model.d_ff",
        "num_kv_heads": "model.num_kv_heads",
        "max_seq_len": "data.seq_len",
        "train_batch_size": "data.batch_size",
        "per_device_parallelism": (
            "train.grad_accum",
            "It counts microbatches: data.batch_size / devices / sequences per device",
        ),
        "num_train_steps": "train.steps",
        "steps_per_eval": "train.eval_every",
        "min_lr_ratio": "optim.final_lr_fraction",
        "warmup": ("optim.warmup_steps", _WARMUP),
        "mp": ("train.dtype", _DTYPE),
        "initialize_from_hf": ("run.init_from", "Name a Hugging Face folder on this machine"),
    },
    "Lightning": {
        "accumulate_grad_batches": "train.grad_accum",
        "max_steps": "train.steps",
        "max_epochs": ("train.steps", _EPOCHS),
        "gradient_clip_val": "optim.clip_norm",
        "precision": ("train.dtype", _DTYPE),
        "val_check_interval": "train.eval_every",
        "limit_val_batches": "train.eval_steps",
        "log_every_n_steps": "run.log_every",
        "default_root_dir": "run.dir",
        "devices": ("mesh.data", "All devices are used by default"),
        "num_nodes": ("distributed.num_processes", "Launchers such as Slurm set it by themselves"),
    },
}
"""By tool: its names, and the keys here. Dashes and underscores are the same."""


class Counterpart(NamedTuple):
    """The key here that a name of other tools means."""

    tools: tuple[str, ...]
    """Tools that have the name."""
    key: str
    """Key here."""
    value: str
    """Value to use, or empty if the value is the user's."""
    how: str
    """How to convert the value, without a full stop, or empty if it stays the same."""


def counterpart(name: str) -> Counterpart | None:
    """Returns the key that a name of another tool means, or None.

    Groups before the last word of a name need not agree: `optimizer.lr` and `train.learning_rate` are both found.
    """
    name = name.replace("-", "_")
    short = {tool: {there.rpartition(".")[2]: here for there, here in names.items()} for tool, names in TOOLS.items()}
    for wanted, table in ((name, TOOLS), (name.rpartition(".")[2], short)):
        if found := {tool: names[wanted] for tool, names in table.items() if wanted in names}:
            here = next(iter(found.values()))
            target, how = here if isinstance(here, tuple) else (here, "")
            key, _, value = target.partition("=")
            return Counterpart(tuple(found), key, value, how)
    return None
