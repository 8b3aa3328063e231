"""Mutants of supervision, the watchdog, checkpoints and processes."""

from mutants.rows import mistakes

mistakes(
    "runs",
    "checkpoint/manifest.py",
    "fuzz/test_power_loss.py",
    ("    for folder in {parent for name in names for parent in Path(name).parents}:\n", "    for folder in ():\n"),
)

mistakes(
    "runs",
    "checkpoint/store.py",
    "fuzz/test_power_loss.py",
    ("for folder in (self._directory.parent, self._directory.parent.parent):", "for folder in ():"),
)

mistakes(
    "supervise", "cli/supervise.py", "checkpoint/test_reliability.py -k 'left or supervisor or waits'",
    ("mesh.fsdp % fsdp == 0 and batch %", "batch %"),
    ("_, fsdp, data = max(choices)", "_, data, fsdp = max(choices)"),
    ("data * fsdp * others <= devices", "data * fsdp <= devices"),
    ("failed = 0 if step > reached else failed + 1", "failed = failed + 1"),
    ("self._wait_s * 2 ** max(failed - 1, 0)", "self._wait_s * 2**failed"),
    ("if failed >= self._tries:", "if failed > self._tries:"),
    ("if fault is not None and fault == before:", "if fault is not None and before is not None:"),
    ("fault = self._logged_step() if code == _FAULT else None", "fault = self._logged_step()"),
)  # fmt: skip

mistakes(
    "supervise", "cli/supervise.py", "cli/test_package.py -k 'try or supervise'",
    ("failed = 0 if step > reached else failed + 1", "failed = 1 if step > reached else failed + 1"),
)  # fmt: skip

mistakes(
    "watch", "runtime/watchdog.py", "checkpoint/test_reliability.py -k watch",
    ("now - heard > self._lost_s and i not in self._ends", "now - heard > self._lost_s"),
    ("now - self._progress > self._stalled_s", "now - self._progress > 1000 * self._stalled_s"),
)  # fmt: skip

mistakes(
    "checkpoint",
    "checkpoint/manifest.py",
    "checkpoint/test_reliability.py -k 'seal or whole or aside or share or written'",
    ("if writer == process and name != NAME)", "if writer == process)"),
    ("if unknown := _unknown(present, wanted)", "if unknown := _unknown(present, dict.fromkeys(present))"),
    ("        if now != size:", "        if now < size:"),
    ("_sha256(checkpoint / name) == wanted[name]", "_sha256(checkpoint / name)[0] == wanted[name][0]"),
    (
        "if unknown := _unknown(_files(checkpoint), digests)",
        "if unknown := sorted(digests.keys() - _files(checkpoint))",
    ),
    ("if (directory / str(step) / NAME).is_file()]", "if (directory / str(step)).is_dir()]"),
    ("bytes_of[least] += wanted[name][0]", "bytes_of[least] += 1"),
    ("return sorted(found, reverse=True)", "return sorted(found)"),
)

mistakes(
    "damage",
    "checkpoint/manifest.py",
    "faults/test_damaged_files.py",
    (
        "in (None, process) and not files.is_foreign(name)]",
        "in (None, process)]",
        "faults/test_damaged_files.py -k foreign_file",
    ),
    ("_STEP.fullmatch(name) is not None and", "_STEP.match(name) is not None and"),
    ("stat.S_ISREG(found.st_mode) else None", "found.st_mode else None"),
)

mistakes(
    "damage",
    "tracking/jsonl.py",
    "faults/test_damaged_files.py -k line",
    ("if not defect(record):", "if record:"),
    ("        at = text.find(_START, end)", "        at = -1"),
    ("    if last and reason and not cut_short:", "    if last and reason:"),
)

mistakes(
    "checkpoint",
    "checkpoint/store.py",
    "checkpoint/test_reliability.py",
    (
        "kept = set(steps[: self._cfg.keep])",
        "kept = set(steps[-self._cfg.keep :])",
        "checkpoint/test_reliability.py -k policies",
    ),
    (
        "step % self._cfg.keep_every == 0",
        "step // self._cfg.keep_every == 0",
        "checkpoint/test_reliability.py -k policies",
    ),
    (
        "kept |= {step for _, step in scored[: self._cfg.keep_best]}",
        "kept |= {step for _, step in scored[-self._cfg.keep_best :]}",
        "checkpoint/test_reliability.py -k policies",
    ),
    (
        "jnp.isfinite(leaf).all() for leaf",
        "jnp.isfinite(leaf).any() for leaf",
        "checkpoint/test_reliability.py -k finite",
    ),
    ("if total > limit:", "if total > 2 * limit:", "checkpoint/test_reliability.py -k parts"),
)

mistakes(
    "checkpoint",
    "checkpoint/verify.py",
    "checkpoint/test_reliability.py",
    (
        "for _, file in stored if file not in read}",
        "for _, file in stored}",
        "checkpoint/test_reliability.py -k loaded",
    ),
    (
        "wanted = {name: digest for name, digest in wanted.items() if name not in unread}",
        "wanted = {name: digest for name, digest in wanted.items() if name in unread}",
        "checkpoint/test_reliability.py -k 'loaded or whole'",
    ),
)

mistakes(
    "checkpoint",
    "common/files.py",
    "checkpoint/test_reliability.py -k whole",
    ("        os.fsync(file.fileno())\n", "        pass\n"),
    ('path.with_name(f".{path.name}.new")', "path"),
)

mistakes(
    "checkpoint", "checkpoint/run_dir.py", "test_train.py -k 'does_not_fit or is_not_trained'",
    ("if cfg.train.steps < max(saved_steps):", "if cfg.train.steps <= max(saved_steps):"),
    ("if key.startswith(_FIXED) and key not in _FREE:", "if key.startswith(_FIXED):"),
    ('_FIXED = ("model.", "optim.name")', '_FIXED = ("model.",)'),
    ("before.get(key) != now[key] and not key.startswith(LAUNCH)]", "before.get(key) != now[key]]", "runtime/test_processes.py -k started"),
)  # fmt: skip

mistakes(
    "distributed",
    "runtime/distributed.py",
    "runtime/test_processes.py -k rows",
    ("position[local] = np.arange(len(local))", "position[: len(local)] = np.arange(len(local))"),
    ("np.unique(np.concatenate([np.arange(rows)[index]", "np.sort(np.concatenate([np.arange(rows)[index]"),
    ('return not reason.startswith("JaxRuntimeError")', "return False", "runtime/test_processes.py -k cause"),
)

mistakes(
    "debug", "debug/search.py", "debug/test_search.py",
    ("waiting += nans or inputs", "waiting += []"),
    ("elif not nans and (self.is_bad(variable, nan=True) or", "elif not nans and ("),
    ("devices if devices.mesh is None else devices.only(taken == number)", "devices"),
)  # fmt: skip

mistakes(
    "debug", "debug/levels.py", "debug/test_search.py -k one_step",
    ("name_stack=outer + inner.source_info.name_stack", "name_stack=inner.source_info.name_stack"),
    ("return not way.guide.is_followed(Scan.loop_of(equation, way))", "return True"),
    ("if len(equation.outvars) != scan_sizes(equation.params)[1]:", "if not equation.outvars:"),
    (' and defined.isdisjoint(_variables(equation.params["jaxpr"].jaxpr)):', ":"),
)  # fmt: skip

mistakes(
    "debug", "debug/levels.py", "debug/test_search.py",
    ('range(p["length"])[:: -1 if p["reverse"] else 1]', 'range(p["length"])'),
    ("np.flatnonzero((now & ~before).any(1))", "np.flatnonzero((now & ~before)[:, 0])"),
    ("if k < self._carried or k in bad]", "if k < self._carried]"),
    ("if i not in tried:", "if False:"),
    ("new\n            carry = results[: self._carried]\n", "new\n            pass\n"),
    ("[devices.choose(runs, v, new, old) for v, new, old in arrays]", "results"),
    ("if kind:", "if not kind:", "debug/test_faults_on_meshes.py -m '' -k idle"),
)  # fmt: skip

mistakes(
    "debug", "debug/devices.py", "debug/test_search.py",
    ("self.active & chosen", "chosen", "debug/test_faults_on_meshes.py -m '' -k idle"),
    ("if axis not in self.split(variable))).ravel()", "if axis in self.split(variable))).ravel()"),
)  # fmt: skip

mistakes(
    "debug", "debug/rules.py", "debug/test_search.py",
    ("(*frames, *_calls[int(rule[-1])]) if", "frames if"),
)  # fmt: skip

mistakes(
    "debug", "debug/guide.py", "debug/test_faults_on_meshes.py -m '' -k idle",
    ("return ~units.active_TP[tick]", "return units.active_TP[tick]"),
)  # fmt: skip

mistakes(
    "debug", "debug/eager.py", "debug/test_eager.py",
    ("if any(map(_is_tracer", "if not any(map(_is_tracer"),
    ("return _kept.setdefault(function, function)", "return function"),
    ("and not _is_array_of_devices(value)", ""),
    ("if program.stages.stacks or program.weight is not None:", "if program.stages.stacks:"),
)  # fmt: skip

mistakes(
    "debug", "debug/describe.py", "debug/test_search.py",
    ("number = group * size + inner", "number = group * size", "debug/test_search.py -m '' -k unit"),
)  # fmt: skip

mistakes(
    "models", "models/shape_errors.py", "models/test_shape_errors.py",
    ("if last.is_own and last.raises:", "if not last.is_own and last.raises:"),
    ("elif size * count == whole:", "elif size == whole * count:"),
    ("return ends[0] if len(ends) == 1 else", "return path if len(ends) == 1 else"),
    ("found.append((calls, text, value))", "found.append((-calls, text, value))"),
)  # fmt: skip

mistakes(
    "tracking", "tracking/recompiles.py", "tracking/test_recompiles.py",
    ("or self._expected or", "or"),
    ("threading.current_thread() is not threading.main_thread()", "False"),
    ("reasons = min((changes(old, signature) for old in known), key=len)", "reasons = changes(known[0], signature)"),
    ("    if function is None or code is None or code.co_filename.startswith(_JAX):", "    if code is None:"),
)  # fmt: skip

mistakes(
    "runtime", "runtime/host_reads.py", "runtime/test_host_reads.py",
    ("if threading.current_thread() is threading.main_thread() else None", "if True else None"),
    ("if file.startswith(_COMPILES) and not compiling:", "if False:"),
    ("            setattr(*self._before.pop())", "            self._before.pop()"),
)  # fmt: skip

mistakes(
    "runtime", "runtime/xla_options.py", "runtime/test_xla_options.py",
    ("if runs_several and purpose in OFF_FOR_SEVERAL", "if False"),
    ("if runs_several and purpose in OFF_FOR_SEVERAL", "if runs_several"),
    ("if not (has_stages and purpose == NOT_IN_PIPELINES)", "if True"),
)  # fmt: skip

mistakes(
    "model", "families/__init__.py", "models/test_model.py -k says_whether",
    ("return any(stack.runs_several for", "return all(not stack.runs_several for"),
)  # fmt: skip

mistakes(
    "planner", "planner/step_bytes.py", "planner/test_step_bytes.py -k triangular",
    ('if "__cublas$triangularSolve" in i.rest:', "if False:"),
)  # fmt: skip

mistakes(
    "training", "training/services/init_from.py", "training/test_keep_zeros.py",
    ("(p.unpadded or p.shape)[p.stacked :]\n        return jnp.any", "p.shape[p.stacked :]\n        return jnp.any"),
    ("if spec[path].kind == \"matrix\"}", "if spec[path].kind}"),
)  # fmt: skip

mistakes(
    "runs",
    "runtime/shared_cache.py",
    "runtime/test_compile_cache.py -k 'all_processes or without_a_shared'",
    ("    if reason:\n", "    if False:\n"),
    ('jax.config.update("jax_compilation_cache_dir", str(folder))', "pass"),
)

mistakes(
    "runs",
    "checkpoint/manifest.py",
    "checkpoint/test_reliability.py -k complete_files",
    ("return found.st_ino, found.st_mtime_ns, found.st_size", "return found.st_ino, 0, found.st_size"),
    ("if not settled or identity[2] < _LEAST_EARLY", "if identity[2] < _LEAST_EARLY"),
    ("return early.get(_identity(checkpoint / name)) or _sha256", "return _sha256"),
)

mistakes(
    "runs",
    "runtime/platform.py",
    "runtime/test_xla_options.py -k 'refuses or accepted or code_2'",
    ("    if not asked.returncode:\n", "    if True:\n"),
    ("os.environ[ACCEPTED_FLAGS] = flags", "pass"),
    ("^[EF]\\d{4} [^", "^[F]\\d{4} [^"),
    ("reason[1].partition(' (')[0]", "reason[1]"),
)

mistakes(
    "runs",
    "cli/parser.py",
    "runtime/test_xla_options.py -k code_2",
    ("if name.split()[0] not in WITHOUT_XLA:", "if name.split()[0] in WITHOUT_XLA:"),
)
