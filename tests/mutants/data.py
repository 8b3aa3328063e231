"""Mutants of data, tokenizers and conversations."""

from mutants.rows import mistakes

DATA = "data/test_data.py data/test_windows.py"

mistakes(
    "data",
    "data/windows.py",
    "data/test_windows.py",
    (
        "np.arange(1, seq_len + 1) < length_B[:, None]",
        "np.arange(1, seq_len + 1) <= length_B[:, None]",
        "data/test_chat.py",
    ),
    ("(piece_BS == piece_BT[:, 1:])", "(piece_BS == piece_BT[:, :-1])"),
    ("rng.integers(slack + 1)", "rng.integers(slack)"),
    ("return [seed, index, 0, source]", "return [seed + index]"),
    (
        "return [seed, index, 0, source]",
        "return [seed, index]",
        "data/test_mixture.py -k orders",
    ),
    ("if left == 1 and not hides:", "if left == 1:"),
    ("% len(stream) != 0  # it", "% len(stream) >= 0  # it"),
    ("np.diff(np.arange(rows + 1) * left // rows)", "np.full(rows, seq_len)"),
    ("rows = -(-left // seq_len)", "rows = left // seq_len or 1"),
    ("batch[name][row_B >= len(samples)] = 0", "batch[name][row_B > len(samples)] = 0"),
    ('"targets": np.ascontiguousarray(ids_BT[:, 1:])', '"targets": np.ascontiguousarray(ids_BT[:, :-1])'),
    ("stream.loss_mask[index_BT[:, 1:]]", "stream.loss_mask[index_BT[:, :-1]]", "data/test_chat.py"),
    ("np.argsort(-length_D, kind", "np.argsort(length_D, kind", "data/test_chat.py"),
)

mistakes(
    "data", "data/token_stream.py", "data/test_windows.py",
    ("at_BT - np.maximum(begins_BT, first_B[:, None])", "at_BT - begins_BT"),
    ("piece_BT + turns_BT * self.count", "piece_BT"),
)  # fmt: skip

mistakes(
    "data", "data/sentences.py", "data/test_sentences.py",
    ("(begins, first - 2 * size)", "(begins, first - size)"),
    ("(ends, len(stream) - size)", "(ends - 1, len(stream) - size)"),
    ("rng.integers(1, self.cfg.parts + 1)", "rng.integers(1, self.cfg.parts)"),
    ("sum(later < part for later", "sum(later > part for later"),
    ("np.random.default_rng([seed, number, _STREAM])", "np.random.default_rng([seed, row, _STREAM])"),
    ("draw -= last - least + 1", "draw -= last - least"),
)  # fmt: skip

mistakes(
    "models", "families/encoder.py", "hf/test_encoders.py -k pairs",
    ('other = {"output"} if there.labels != here.labels else set()', "other = set()", "models/test_encoder_heads.py"),
    ("pooled = jnp.tanh(kernels.linear(", "pooled = (kernels.linear("),
)  # fmt: skip

mistakes(
    "data", "data/prefetch.py", "data/test_windows.py",
    ("ds.__getitem__, step + depth))", "ds.__getitem__, step + 1))"),
)  # fmt: skip

mistakes(
    "data", "data/masking.py", "data/test_masking.py",
    ("np.isin(targets, self.never)", "np.isin(targets, self.never[:1])", "data/test_sentences.py"),
    ("inside_BS[:, 1:] &= segments_BS[:, 1:] == segments_BS[:, :-1]", "pass"),
    ("own_BS * self.share, 1.0)", "draw_BS, 1.0)"),
    ("np.where(first_read_BS, draw_BS, 1.0)", "draw_BS", "data/test_windows.py"),
    ("self.goes_back[ids_BS[:, 1:]] & self.open_ended[ids_BS[:, :-1]]", "self.goes_back[ids_BS[:, 1:]]"),
)  # fmt: skip

mistakes(
    "data", "data/phrases.py", "data/test_phrases.py",
    ("order = np.lexsort([start, row, -size])", "order = np.lexsort([-size, start, row])"),
    ("whole = self.ends_N[node] & begins_BS[row, start + depth + 1]", "whole = self.ends_N[node]"),
    ("row, start = np.nonzero(begins_BS[:, :-1])", "row, start = np.nonzero(begins_BS[:, :-1] | True)"),
    ("(documents_BS[row, place] == documents_BS[row, start])", "True"),
    ("for before in _BEFORE_PHRASE)", "for before in _BEFORE_PHRASE[:1])"),
    ("ends[node] = True", "ends[-1] = True"),
)  # fmt: skip

mistakes(
    "data", "data/triples.py", "data/test_triples.py",
    ("room = seq_len - sum(each.size for each in own) - behind.size", "room = seq_len - sum(each.size for each in own)"),
    ("same_BS[:, :-1] = inside_BS[:, 1:] &", "same_BS[:, :-1] = True &"),
    ("np.take_along_axis(draw_BS, first_BS, 1) * numbers.size", "draw_BS * numbers.size"),
)  # fmt: skip

mistakes(
    "data", "data/masking.py", "data/test_triples.py",
    ("np.where(parts_BS == triples.TEXT, draw_BS, 0.0)", "draw_BS"),
    ('if not self.has_triples or "segment_ids" in batch:', 'if True or "segment_ids" in batch:'),
)  # fmt: skip

mistakes(
    "data", "data/windows.py", "data/test_triples.py",
    ("segment_BS + window_S * size, 0)", "segment_BS, 0)"),
    ("(row_B[:, None] * self.count + np.arange(self.count)).ravel()", "(row_B[:, None] + np.arange(self.count)).ravel()"),
)  # fmt: skip

mistakes(
    "data", "data/dataset.py", "data/test_triples.py",
    ('"\\n".join(row.triple[::2])', '"\\n".join(row.triple)'),
)  # fmt: skip

mistakes(
    "data", "data/spans.py", "data/test_spans.py",
    ("_parts(rng, length - hidden + 2, spans + 1)", "_parts(rng, length - hidden + 1, spans + 1)"),
    ("np.random.default_rng([seed, number, _STREAM])", "np.random.default_rng([seed, _STREAM])"),
    ("rng.integers(window.size - length + 1)", "0"),
    ("np.cumsum(sizes) - sizes, sentinels)", "np.cumsum(sizes), sentinels)"),
    ("if count <= self.text_len:", "if count < self.text_len:"),
    ("inputs = np.insert(inputs, 0,", "inputs = np.insert(inputs, inputs.size,"),
)  # fmt: skip

mistakes(
    "data", "data/seq2seq.py", "data/test_spans.py",
    ("np.append(start_id, pair.targets[:-1])", "pair.targets"),
    ("enumerate(pairs, start=1)", "enumerate(pairs)"),
    ("range(size - 1, size - 1 - max(SENTINELS, spans), -1)", "range(size - max(SENTINELS, spans), size)"),
    ("if sentinels and len(sentinels) < spans", "if sentinels and len(sentinels) < spans - 1"),
)  # fmt: skip

mistakes(
    "data", "data/seq2seq.py", "data/test_pairs.py",
    ("for language in languages if len(languages) > 1}", "for language in languages}"),
    ("names += dict.fromkeys(", "names = dict.fromkeys("),
)  # fmt: skip

mistakes(
    "data", "config/data.py", "data/test_pairs.py",
    ('own |= {"denoisers": (), "target_len": self.target_length}', 'own |= {"denoisers": ()}'),
)  # fmt: skip

mistakes(
    "data", "data/mixture.py", "data/test_pairs.py",
    ("if self._masking and not reader.is_complete:", "if self._masking:"),
)  # fmt: skip

mistakes(
    "data", "data/mixture.py", "data/test_mixture.py -k 'drawn or orders'",
    ("part = reader.read(index_B[here], row_B[here])", "part = reader.read(index_B[here])"),
    ("self._masking.apply(part, row_B[here],", "self._masking.apply(part, index_B[here],"),
)  # fmt: skip

RESUMED = "data/test_position.py -k 'reads_on or other_masks or older or other_sequences or complete_pass or pictures'"

mistakes(
    "data", "data/mixture.py", RESUMED,
    ("row_B = sequences + self._read_before.sum()", "row_B = sequences"),
    ("return source_B, index_B + self._read_before[source_B]", "return source_B, index_B"),
    ("first = (index - self._first) * self._batch_size", "first = index * self._batch_size"),
    ("*((step - first, each) for step", "*((step, each) for step"),
    ("for step, each in phases if step <= first]", "for step, each in phases if step < 1]"),
)  # fmt: skip

mistakes(
    "data", "data/buckets.py", RESUMED,
    ("Start(0, [self._read_before[j]])", "Start()"),
    ("numbers = self._order.counts(max(index - self._first, 0)).tolist()", "numbers = self._order.counts(index).tolist()"),
)  # fmt: skip

mistakes(
    "data", "data/position.py", RESUMED,
    ("passes = max((-(-n // _rows(order))", "passes = max((n // _rows(order)"),
    ("sum(passes * _rows(order) - n for n", "sum(passes * _rows(order) for n"),
    ("if not any(orders) or (same_text and before == [*orders]):", "if not any(orders) or before:"),
)  # fmt: skip

mistakes(
    "data", "data/loader.py", RESUMED,
    ('if reader.read_before(index) == saved["read"]:', "if True:"),
    ('order["place in the mixture"] = 0', "pass"),
    ("counts[k] = passes * windows + rest", "pass"),
    ("start = Start(index, [[one.read[j]", "start = Start(0, [[one.read[j]"),
)  # fmt: skip

mistakes(
    "data", "data/images.py", RESUMED,
    ("before + max(index - self.start.batch, 0) * self.batch_size", "index * self.batch_size"),
)  # fmt: skip

mistakes(
    "data", "config/denoisers.py", "data/test_spans.py",
    ("return length - hidden + spans + 1 + (self.mode is not None)", "return length - hidden + spans + 1"),
    ("and targets <= (target_len or targets)", ""),
    ("round(hidden / self.span)", "int(hidden / self.span)"),
)  # fmt: skip

mistakes(
    "data", "data/pairs.py", "data/test_pairs.py",
    ('" ".join(text.split()).casefold()', "text"),
    ("min(max(bound, ascending[1]), ascending[-1])", "bound"),
    ("special.named[first_tokens[one.language]])", "special.named[first_tokens[languages[0]]])"),
    ("targets.size > lengths[1]:", "targets.size > lengths[0]:"),
    ("unique.setdefault(one[1:], one)", "unique.setdefault(one, one)"),
    ("np.cumsum(length_W) - length_W, length_W)", "np.cumsum(length_W) - length_W, np.ones_like(length_W))"),
    ("free[place] -= size", "free[place, 0] -= size[0]"),
    ("middles=self.middles[which])", "middles=self.middles)"),
)  # fmt: skip

mistakes(
    "data", "data/translations.py", "data/test_pairs.py",
    (" and not message.fuzzy", ""),
    ('file.suffix != ".mo" or file.with_suffix("") not in sources', "True"),
    ('file.parents[1].name if file.parent.name == "LC_MESSAGES" else file.stem', "file.stem"),
    ('.decode("utf-8-sig")', ".decode(errors='replace')"),
    ("if not count[language]:", "if count[language] < 0:"),
)  # fmt: skip

mistakes(
    "data", "data/labelled.py", "data/test_labelled.py",
    ("(ends > first) & (starts < last)", "(ends >= first) & (starts < last)"),
    ("piece_BS - piece_BS[:, :1] + 1, 0)", "piece_BS - piece_BS[:, :1], 0)"),
    ("found[0].size > room", "found[0].size >= room"),
)  # fmt: skip

mistakes(
    "data", "data/tokens.py", DATA,
    ("kept = min(int(len(tokens) * (1 - eval_fraction))", "kept = min(int(len(tokens) * eval_fraction)"),
    ("if pattern.fullmatch(name)", "if pattern.match(name)"),
    (
        "return tokens.without(held_out), tokens.documents(held_out)",
        "return tokens.documents(held_out), tokens.without(held_out)",
    ),
    ("chunk.max() >= header.vocab_size", "chunk.max() > header.vocab_size", "data/test_token_file.py"),
    ("found != header.sha256.get(key)", "key not in header.sha256", "data/test_token_file.py"),
    ("bool((tokens.sizes(chunk) >= 0).all())", "bool((tokens.sizes(chunk) >= 0).any())", "data/test_token_file.py"),
)  # fmt: skip

mistakes(
    "data",
    "data/sources.py",
    "data/test_data.py",
    ("if f not in _TEST_FOLDERS | _OTHER_PACKAGES", "if f not in _TEST_FOLDERS"),
    ("for f in files if not is_foreign(f)]", "for f in files]"),
)

mistakes(
    "data",
    "data/ngram.py",
    "data/test_ngram.py",
    ("total[context] + followers[context], 1)", "total[context], 1)"),
    ("other_full = other_offset >= n - 1", "other_full = other_offset >= 0"),
    ('is_target[:, 1:] = batch["loss_weights"] > 0', 'is_target[:, 1:] = batch["loss_weights"] >= 0'),
)

mistakes(
    "limits", "common/inputs.py", "fuzz/test_limits.py",
    ("if _is_deeper(value, MOST_DEPTH):", "if _is_deeper(value, 10 * MOST_DEPTH):"),
    ("parse_int=parse_integer, ", ""),
    ("if expanded > max(_EXPANDED_BYTES, _EXPANSION * packed):", "if expanded > 1 << 62:"),
    ('getattr(os, "O_NONBLOCK", 0)', "0"),
)  # fmt: skip

mistakes(
    "limits", "config/reading/yaml_check.py", "fuzz/test_limits.py",
    ("raise LimitError(f\"the alias {anchor} contains itself\")", "known = 0, 0"),
    ("anchors[anchor] = values, levels", "anchors[anchor] = 1, levels"),
)  # fmt: skip

mistakes(
    "limits", "data/template_process.py", "fuzz/test_limits.py",
    ("signal.setitimer(signal.ITIMER_PROF, seconds)", "signal.setitimer(signal.ITIMER_PROF, 1e6)"),
    ("resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))", "pass"),
)  # fmt: skip

mistakes(
    "tokenizers",
    "data/tokenizers.py",
    "data/test_data.py data/test_chat.py",
    ("np.cumsum(ids & 0xC0 != 0x80) - 1", "np.cumsum(ids & 0xC0 != 0x80)"),
    ("_ByteTable([c.encode() for c in self.alphabet])", "_ByteTable([c.encode()[:1] for c in self.alphabet])"),
    ("return np.min_scalar_type(vocab_size - 1)", "return np.min_scalar_type(vocab_size)"),
    ("add_special_tokens=False)", "add_special_tokens=True)"),
    ("self.vocab_size = max(vocab.values()) + 1", "self.vocab_size = len(vocab)"),
)

mistakes(
    "chat",
    "data/chat.py",
    "data/test_chat.py",
    ("(ends > start) & (starts < end)", "(starts >= start) & (ends <= end)"),
    ("if ids.size > seq_len + 1:", "if ids.size > seq_len:"),
    ("if not answers[1:].any()", "if not answers.any()"),
    ("len(before) + _answer_length(after[len(before) :], message", "len(before) + _answer_length(after, message"),
    ('said = message["content"] + "\\0" * (message["role"] == "assistant")', 'said = message["content"]'),
    ("if ordinary == 0 or len(ids) == 1:", "if ordinary == 0:"),
    ("EndOfTurn(tuple(ids[ordinary : ordinary + 1])", "EndOfTurn(tuple(ids[:1])"),
    ("if i not in conversation.unlearned]", "if i in conversation.unlearned]"),
    ("if conversation.unlearned and len(spans) != answers:", "if False:"),
)

mistakes(
    "chat", "data/conversations.py", "data/test_chat.py",
    ("learned is not False and said is not False", "said is not False"),
    ("isinstance(one, str | list | dict) or one not in (0, 1)", "one not in (0, 1, 2.0)"),
    ("if len(set(said.values())) > 1:", "if False:"),
)  # fmt: skip

mistakes(
    "data", "data/text_stream.py", "data/test_text_stream.py",
    ("word.startswith(text[-n:])", "word.endswith(text[-n:])"),
    ("return min((at for at", "return max((at for at"),
    ("text = text[: len(text) - count_held(text, self._stop)]", "pass"),
)  # fmt: skip

mistakes(
    "data", "data/hf_datasets.py", "data/test_files_of_others.py",
    ("if path.is_file():", "if False:", "data/test_files_of_others.py -k single"),
    ("if tables[1:]:", "if False:", "data/test_files_of_others.py -k damaged"),
    ("logger.handlers = [collect]", "pass", "data/test_files_of_others.py -k damaged"),
    ("select(range(part.from_, part.to))", "select(range(part.to))", "data/test_files_of_others.py -k save_to"),
)  # fmt: skip

mistakes(
    "data", "data/binary.py", "data/test_binary.py",
    ("for width in (8, 4):", "for width in (4,):"),
    ("if any(begin) and size", "if size"),
    ("if vocab_size > 1 << 16:", "if False:"),
    ("high.max() < _FEWEST and", "high.max() < 0 and"),
    ("if other := _other_file(begin):", "if other := None:"),
    ("array.ndim != 1 or", ""),
    ("magic not in {known for known, _ in _LLMC}", "True"),
    ("int(part) if part.isdecimal() else part for part", "part for part"),
    ("layout.edges[:-1] + begin for", "layout.edges[:-1] for"),
    ("and not file.name.startswith", "or not file.name.startswith"),
    ("if file.suffix != part[0].suffix or", "if"),
    ("        if layouts[1:]:\n            digest", "        if False:\n            digest"),
    ("-(-layout.size // -(-_PIECES // files))", "-(-layout.size // _PIECES)"),
)  # fmt: skip

mistakes(
    "data", "data/file_ids.py", "data/test_binary.py",
    ('side="right") - 1', 'side="left") - 1'),
    ("            state.require_unchanged()\n", ""),
    ("if places[1:]:", "if False:"),
    ("[int(at)])  # also", "[abs(int(at))])  # also"),
)  # fmt: skip

mistakes(
    "data", "data/buckets.py", "data/test_buckets.py",
    ("(tokens.sizes() - 1) // seq_len", "tokens.sizes() // seq_len"),
    ("np.minimum(starts + seq_len + 1, cut.ends)", "np.minimum(starts + seq_len, cut.ends)"),
    ('sum(row) / size["batch_size"] for row', "sum(row) for row"),
    ("{int(self._order.counts(step)[j]): rows[j]", "{step: rows[j]"),
    ('batch["loss_weights"][row_B >= count] = 0', 'batch["loss_weights"][row_B > count] = 0'),
    ("cost = possible * total\n", "cost = possible * weights\n"),
    ("rows = cfg.batch_size & -cfg.batch_size", "rows = cfg.batch_size"),
)  # fmt: skip

mistakes(
    "data", "data/text_pieces.py", "data/test_text_pieces.py",
    ('r"(?<=[^\\W_])(?=[\\r\\n])"', 'r"(?=[\\r\\n])"'),
    ('r"(?<=[^\\W_])(?=[\\r\\n])"', 'r"(?<=[^\\W_][\\r\\n])"'),
    ('last.get("add_prefix_space")', "False"),
    ("len(splits) == 1 and splits[0] in _SPLITS", "splits[-1:] != [None]"),
    ("any(added.get(flag) for flag in flags)", "False"),
    ("size += len(text_of(item))", "size = len(text_of(item))"),
)  # fmt: skip

mistakes(
    "data", "data/tokenizers.py", "data/test_text_pieces.py",
    ("spans = piece.start + np", "spans = np"),
    ("self._can_cut = can_cut(tokenizer)", "self._can_cut = False"),
)  # fmt: skip

mistakes(
    "data",
    "data/windows.py",
    "data/test_document_count.py",
    ("last_B = first_B + seq_len - 1", "last_B = first_B + seq_len"),
    ("- self.stream.pieces(first_B) + 1", "- self.stream.pieces(first_B)"),
    ("return within + 2", "return within + 1"),
    ("taken = min(int(count_N[length]), room // int(length))", "taken = min(int(count_N[length]), 1)"),
    ("epochs = 1 if self.is_padded else -(-sequences // self.windows)", "epochs = 1"),
)

mistakes(
    "data",
    "data/document_count.py",
    "data/test_document_count.py",
    ("most is None or most > LIMIT", "most is None or most > LIMIT + 1"),
    ("if keys.keeps_documents:", "if False:"),
    ("return max(reader.most_documents(steps, LIMIT), *evaluated)", "return max(evaluated)"),
)

CLEAN = "data/test_clean.py"

mistakes(
    "clean", "data/clean/rules.py", CLEAN,
    ("return (len(parts) - len(first)) / len(parts)", "return len(first) / len(parts)"),
    ("np.maximum(starts, np.roll(starts, 1) + n)", "starts"),
    ("starts = np.flatnonzero(np.bincount(gram)[gram] > 1)", "starts = np.flatnonzero(np.bincount(gram)[gram] > 2)"),
    ("        if value > getattr(rules, key):\n            yield Failure(f\"repetition", "        if value >= getattr(rules, key):\n            yield Failure(f\"repetition"),
    ("for word in words) / count,", "for word in words) / len(lines),"),
    ("line.endswith(rules.line_ends)", "line.rstrip('0123456789').endswith(rules.line_ends[:1])"),
)  # fmt: skip

mistakes(
    "clean", "data/clean/overlap.py", CLEAN,
    ("if first - rules.window > begin:", "if first > begin:"),
    ("begin = max(begin, last + rules.window)", "begin = max(begin, last)"),
)  # fmt: skip

mistakes(
    "clean", "data/clean/cleaning.py", CLEAN,
    ("if len(found) <= common)", "if len(found) < common)"),
    ("key=lambda i: (-ordered[i].size,", "key=lambda i: (ordered[i].size,"),
    ("    return Cleaned(sorted(texts)", "    return Cleaned(texts"),
    ("            removed |= {*range(i, i + length)}", "            removed |= {i}"),
)  # fmt: skip

mistakes(
    "clean", "data/clean/duplicates.py", CLEAN,
    ("            if similarity >= rules.threshold:", "            if similarity >= 0:"),
    ("range(max(len(words) - n + 1, 1))", "range(max(len(words) - n, 1))"),
)  # fmt: skip

mistakes(
    "clean", "data/clean/workers.py", CLEAN,
    ("if read_key(task.file) == task.key():", "if read_key(task.file):"),
)  # fmt: skip

mistakes(
    "data",
    "data/token_stream.py",
    "data/test_large_texts.py",
    ("np.random.default_rng([*self._seeds, number + 1])", "np.random.default_rng(self._seeds)"),
    ("from_documents(documents, rng.permutation(size))", "from_documents(documents, np.arange(size))"),
    ("within.number + self._numbers_K[number]", "within.number"),
    ("self._order_K = rng.permutation(tokens_K.size)", "self._order_K = np.arange(tokens_K.size)"),
    ("is_apart = starts[1:] != ends[:-1]", "is_apart = starts[1:] > starts[:-1]"),
)
mistakes(
    "data",
    "data/document_edges.py",
    "data/test_large_texts.py",
    ('searchsorted(self._before, at, side="right")', 'searchsorted(self._before, at, side="left")'),
    ("if found.size < end - begin:", "if False:"),
)
mistakes(
    "data",
    "data/tokens.py",
    "data/test_large_texts.py",
    ("if complete or length.sum() >= budget:", "if True:"),
    ("int(length[fits].sum())", "int(length[taken].sum())"),
)
mistakes(
    "data",
    "data/windows.py",
    "data/test_large_texts.py",
    ('self.order["documents shuffled together"] = BLOCK', "pass"),
    ("max_index=size - 1", "max_index=size"),
)

mistakes(
    "data", "cli/data_tokenizer.py", "data/test_bpe.py -k chat",
    (" if token not in special)", ")"),
)  # fmt: skip

mistakes(
    "data", "data/bpe.py", "data/test_bpe.py -k chat",
    ("message['content'] + '<|end|>' -}}{%- endgeneration -%}", "message['content'] -}}{%- endgeneration -%}{{- '<|end|>' -}}"),
)  # fmt: skip
