"""Tests of `jaxstack data clean`: rules against their plain definitions, duplicates, the same bytes in any order."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from jaxstack.cli.parser import execute
from jaxstack.config import ConfigError
from jaxstack.data.clean import cleaning, duplicates, overlap, parts, rules
from jaxstack.data.clean.settings import (
    C4Rules,
    LanguageRules,
    NearRules,
    OverlapRules,
    QualityRules,
    RepetitionRules,
    Settings,
    from_dict,
)
from jaxstack.data.clean.workers import decode, encode

WORDS = ["the", "of", "and", "cat", "a1", "sat", "on", "mat", "#", "...", "is", "Über", "12", "—", "house", "river."]


def random_text(rng: np.random.Generator, lines: int = 12) -> str:
    """Returns lines of few different words, some of them repeated, with empty lines between some."""
    made = [" ".join(rng.choice(WORDS, size=rng.integers(1, 14))) for _ in range(lines)]
    picked = [made[i] for i in rng.integers(0, lines, size=lines)]
    return "".join(line + str(rng.choice(["\n", "\n\n", "\n \n", "  \n"])) for line in picked)


def plain_shares(text: str) -> dict[str, float]:
    """Table A1 of the paper, word by word, by the terms that `rules` defines."""
    found = {}
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    paragraphs: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.strip():
            paragraphs[-1].append(line)
        else:
            paragraphs.append([])
    for name, units in (("line", lines), ("paragraph", ["\n".join(p).strip() for p in paragraphs if p])):
        repeated = [unit for i, unit in enumerate(units) if unit in units[:i]]
        found[f"{name}s"] = len(repeated) / len(units)
        found[f"{name}_characters"] = sum(map(len, repeated)) / sum(map(len, units))
    words = text.split()
    total = sum(map(len, words))
    for n in range(2, 11):
        if n <= 4:
            grams = Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
            most = max(grams.values())
            shares = [covered(words, n, {gram}) / total for gram, count in grams.items() if count == most > 1]
            found[f"top_{n}gram"] = max(shares, default=0.0)
        if n >= 5:
            grams = Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
            found[f"repeated_{n}gram"] = covered(words, n, {g for g, count in grams.items() if count > 1}) / total
    return found


def covered(words: list[str], n: int, grams: set[tuple[str, ...]]) -> int:
    """Returns the characters of all words that are in one of the sequences."""
    inside = {i + j for i in range(len(words) - n + 1) if tuple(words[i : i + n]) in grams for j in range(n)}
    return sum(len(words[i]) for i in inside)


def test_repetition_is_the_table_of_the_paper(rng):
    for lines in (2, 3, 5, 8, 12, 40):
        for _ in range(6):
            text = random_text(rng, lines)
            assert rules.repetition_shares(text) == pytest.approx(plain_shares(text), abs=1e-12), text


def test_repetition_by_hand():
    """`a b` occurs three times in a row: 6 of 10 words. No sequence of 5 words occurs twice."""
    shares = rules.repetition_shares("a b a b a b c d e f")
    assert shares["top_2gram"] == pytest.approx(0.6)
    assert shares["top_3gram"] == pytest.approx(0.5)  # `a b a` covers the words 1 to 5, and `b a b` 2 to 6
    assert shares["repeated_5gram"] == 0
    assert shares["lines"] == 0
    assert rules.repetition_shares("x\nx\nx\nyyyyyy")["lines"] == pytest.approx(2 / 4)
    assert rules.repetition_shares("x\nx\nx\nyyyyyy")["line_characters"] == pytest.approx(2 / 9)
    assert set(rules.repetition_shares("").values()) == {0.0}
    # The only sequence of 5 words that repeats has both its occurrences counted: 10 of 11 characters.
    assert rules.repetition_shares("a b c d e x a b c d e")["repeated_5gram"] == pytest.approx(10 / 11)


def test_repetition_has_the_thresholds_of_the_paper():
    """Rae et al. 2021, table A1."""
    limits = RepetitionRules()
    assert (limits.lines, limits.paragraphs, limits.line_characters, limits.paragraph_characters) == (
        0.3,
        0.3,
        0.2,
        0.2,
    )
    assert [getattr(limits, f"top_{n}gram") for n in (2, 3, 4)] == [0.2, 0.18, 0.16]
    assert [getattr(limits, f"repeated_{n}gram") for n in range(5, 11)] == [0.15, 0.14, 0.13, 0.12, 0.11, 0.1]
    text = "\n".join(["same line here"] * 2 + [f"line number {i} of the text" for i in range(40)])
    assert next(rules.repetition(text, RepetitionRules(lines=0.02))).rule == "repetition.lines"
    exact = RepetitionRules(lines=1 / 42)
    assert "repetition.lines" not in {failure.rule for failure in rules.repetition(text, exact)}  # only above the limit


def plain_quality(text: str, limits: QualityRules) -> set[str]:
    """The sentences of the paper's appendix A.1.1."""
    words = text.split()
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    mean = sum(len(word) for word in words) / len(words)
    letters = [word for word in words if any(char.isalpha() for char in word)]
    present = [word for word in limits.stop_words if word in [w.lower() for w in words]]
    failing = {
        "min_words": len(words) < limits.min_words,
        "max_words": len(words) > limits.max_words,
        "min_word_length": mean < limits.min_word_length,
        "max_word_length": mean > limits.max_word_length,
        "max_hash_ratio": len(re.findall("#", text)) / len(words) > limits.max_hash_ratio,
        "max_ellipsis_ratio": len(re.findall(r"\.\.\.|…", text)) / len(words) > limits.max_ellipsis_ratio,
        "max_bullet_lines": sum(line[0] in "•-*" for line in lines) / len(lines) > limits.max_bullet_lines,
        "max_ellipsis_lines": sum(line[-1] == "…" or line[-3:] == "..." for line in lines) / len(lines)
        > limits.max_ellipsis_lines,
        "min_alphabetic_words": len(letters) / len(words) < limits.min_alphabetic_words,
        "min_stop_words": len(present) < limits.min_stop_words,
    }
    return {f"quality.{name}" for name, fails in failing.items() if fails}


def test_quality_is_what_the_paper_says(rng):
    seen = set()
    for _ in range(60):
        lines = [str(rng.choice(["- ", "• ", "", ""])) + random_text(rng, 1).strip() for _ in range(8)]
        text = "\n".join(line + str(rng.choice(["", " ...", "…"])) for line in lines)
        limits = QualityRules(
            min_words=int(rng.integers(0, 80)), max_words=int(rng.integers(20, 90)),
            min_word_length=rng.uniform(2, 4), max_word_length=rng.uniform(2, 4), max_hash_ratio=rng.uniform(0, 0.2),
            max_ellipsis_ratio=rng.uniform(0, 0.3), max_bullet_lines=rng.uniform(0, 1),
            max_ellipsis_lines=rng.uniform(0, 1), min_alphabetic_words=rng.uniform(0.4, 1),
            min_stop_words=int(rng.integers(0, 5)),
        )  # fmt: skip
        found = {failure.rule for failure in rules.quality(text, limits)}
        assert found == plain_quality(text, limits), text
        seen |= found
    assert len(seen) == 10  # every filter was failed once


def test_quality_has_the_thresholds_of_the_paper():
    good = " ".join(["the house of words"] * 12) + " and more"
    assert [*rules.quality(good, QualityRules())] == []
    assert [f[:3] for f in rules.quality("these cats and of", QualityRules())] == [("quality.min_words", 4, 50)]
    assert [f.rule for f in rules.quality("", QualityRules())] == ["quality.min_words"]


def test_c4_keeps_lines_by_the_rules_of_the_paper():
    lines = """A line of text that ends well [1].
        no end here of this line of words
        Too few words.
        Please enable JavaScript to see this page.
        Read our Privacy Policy before you use it.
        She said: "this is a good line of text"
        Is this fifth line one to keep?[citation needed]"""
    assert rules.c4_lines(lines, C4Rules()).split("\n") == [
        "A line of text that ends well .", 'She said: "this is a good line of text"', "Is this fifth line one to keep?",
    ]  # fmt: skip


def test_c4_drops_documents_by_the_rules_of_the_paper():
    bad = rules.bad_words_pattern(["Rude", "two words", ""])
    text = "One sentence of words. Another! A third?"

    def failing(text):
        return [failure.rule for failure in rules.c4_document(text, text, C4Rules(), bad)]

    assert failing(text) == []
    assert failing("One sentence. Another 3.5 of them") == ["c4.min_sentences"]
    assert failing(text + " Lorem Ipsum.") == ["c4.document_phrases"]
    assert failing(text + " {x}.") == ["c4.document_phrases"]
    assert failing(text + " rude.") == failing(text + " Two words.") == ["c4.bad_words"]
    assert failing(text + " rudeness.") == []


def test_of_a_span_of_three_sentences_one_occurrence_is_kept(tmp_path):
    """The documents share the sentences 2 to 5 of the first. Which document keeps them depends on hashes alone."""
    shared = [
        "The second sentence is long.",
        "The third one is here.",
        "The fourth one comes now.",
        "And this is fifth.",
    ]
    one = ["A first sentence of the text.", *shared, "The end of one is near.", "It has more to say."]
    two = ["Other words are said at first.", *shared, "Other words are said at last.", "Then the text is over."]
    (tmp_path / "one.txt").write_text("\n".join(one))
    (tmp_path / "two.txt").write_text("\n".join(two))
    clean(tmp_path, "out", [tmp_path / "one.txt", tmp_path / "two.txt"], "--rules=[c4]", "--c4.min_line_words=3")
    texts = {row["text"] for row in read(tmp_path / "out" / "kept.jsonl")}
    kept_in = [name for name, own in (("one", one), ("two", two)) if "\n".join(own) in texts]
    assert len(kept_in) == 1
    other = two if kept_in == ["one"] else one
    assert "\n".join([other[0], *other[5:]]) in texts


def test_sequences_are_words_in_lower_case_without_punctuation():
    keys = [key for key, _, _ in overlap.sequences("Hello, World! it's -- 3.5 £", 3)]
    assert keys == [key for key, _, _ in overlap.sequences("hello world its 35", 3)]
    assert [(a, b) for _, a, b in overlap.sequences("Hello, World! it's -- 3.5", 3)] == [(0, 18), (7, 25)]


def test_overlap_is_cut_out_with_its_window():
    hashes, short = overlap.evaluation_hashes(["b c d", "x"], 3)
    assert short == 1
    text = "a" * 30 + " b C, d. " + "e" * 30
    limits = OverlapRules(texts=("x",), ngram=3, window=5, min_characters=20, max_pieces=2)
    first, last = text.index("b"), text.index("d.") + 2
    assert overlap.cut(text, hashes, limits) == [text[: first - 5], text[last + 5 :]]
    assert overlap.cut("nothing of it", hashes, limits) == ["nothing of it"]
    assert overlap.cut("b c d", hashes, limits) == []
    assert overlap.cut(text * 2, hashes, limits) is None  # three pieces


def test_a_common_sequence_is_no_overlap(tmp_path):
    """Of the evaluation's two sequences, one is in two documents and the other in three, of which two are allowed."""
    (tmp_path / "evaluation.txt").write_text("red green blue black. then one two three four.")
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(3):
        rare = "red green blue black" if i < 2 else "white"
        (folder / f"{i}.txt").write_text(f"{chr(97 + i) * 60} {rare} {'y' * 60} one two three four {'z' * 60}")
    flags = ["--rules=[]", f"--overlap.texts=[{tmp_path / 'evaluation.txt'}]", "--overlap.ngram=4"]
    flags += ["--overlap.window=2", "--overlap.min_characters=20", "--overlap.max_documents=2"]
    clean(tmp_path, "out", [folder], *flags)
    texts = [row["text"] for row in read(tmp_path / "out" / "kept.jsonl")]
    assert not any("red" in text for text in texts)
    assert sum("one two three four" in text for text in texts) == 3
    assert len(texts) == 5  # two documents have two pieces


def test_estimated_similarity_is_the_jaccard_similarity(rng):
    """The estimate of k hashes is a mean of k trials: four standard errors are exceeded by one pair of 16,000."""
    pytest.importorskip("datasketch", reason="needs the extra [clean]")
    limits = NearRules(ngram=2, hashes=256)
    for share in (0.1, 0.3, 0.5, 0.8, 0.95):
        words = [f"w{i}" for i in rng.integers(0, 5000, size=400)]
        other = [word if rng.random() < share else f"x{i}" for i, word in enumerate(words)]
        one, two = " ".join(words), " ".join(other)
        a, b = {*pairwise(words)}, {*pairwise(other)}
        exact = len(a & b) / len(a | b)
        estimate = np.mean(duplicates.signature(one, limits) == duplicates.signature(two, limits))
        assert abs(estimate - exact) <= 4 * np.sqrt(max(exact * (1 - exact), 0.01) / limits.hashes)


def test_near_duplicates_are_found_and_connected(rng):
    """Texts of equal length that differ in one place share all sequences that do not contain it."""
    pytest.importorskip("datasketch", reason="needs the extra [clean]")
    limits = NearRules(ngram=5, threshold=0.7)
    words = [f"w{i}" for i in rng.integers(0, 900, size=100)]
    texts = [" ".join([*words[:50], f"new{i}", *words[51:]]) for i in range(3)]
    texts += [" ".join(f"v{i}" for i in rng.integers(0, 900, size=100))]
    pairs = [*duplicates.near_pairs([duplicates.signature(text, limits) for text in texts], limits)]
    assert {(pair.first, pair.second) for pair in pairs} == {(0, 1), (0, 2), (1, 2)}
    assert duplicates.components(6, [duplicates.Pair(4, 5, 1), duplicates.Pair(1, 4, 1)]) == [0, 1, 2, 3, 1, 1]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def clean(folder, name, texts, *flags):
    """Runs the command in this process and returns the files that it has written."""
    out = folder / name
    execute(["data", "clean", *map(str, texts), str(out), "--processes=1", *flags])
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture
def texts(tmp_path, rng):
    """Two folders with random texts: some are equal, and some fail a rule."""
    for name in ("left", "right"):
        (tmp_path / name).mkdir()
        for i in range(6):
            words = [str(word) for word in rng.choice([w for w in WORDS if w.isalpha()] + ["with", "that"], size=90)]
            words = [f"{word}{rng.integers(100)}" if rng.random() < 0.7 else word for word in words]
            (tmp_path / name / f"{i}.txt").write_text(" ".join(words))
        (tmp_path / name / "same.txt").write_text("the very same text of a file that is there more than once " * 3)
        (tmp_path / name / "short.txt").write_text(f"too short {name}")
    return [tmp_path / "left", tmp_path / "right"]


SOME = ("--rules=[quality,exact]",)


def test_files_do_not_depend_on_order_chunks_and_processes(texts, tmp_path, monkeypatch, capsys):
    first = clean(tmp_path, "first", texts, *SOME)
    assert {*first} == {"kept.jsonl", "dropped.jsonl", "report.html", "report.json"}
    assert len(read(tmp_path / "first" / "kept.jsonl")) == 12
    reasons = Counter(row["reason"] for row in read(tmp_path / "first" / "dropped.jsonl"))
    assert reasons == {"quality.min_words": 4}  # `same` has 36 words
    assert clean(tmp_path, "second", texts[::-1], *SOME) == first
    monkeypatch.setattr(cleaning, "CHUNK_DOCUMENTS", 3)
    assert clean(tmp_path, "third", texts[::-1], *SOME) == first
    assert clean(tmp_path, "fourth", texts, *SOME, "--processes=2") == first


def test_of_equal_texts_one_is_kept_and_the_page_names_the_others(texts, tmp_path):
    (texts[1] / "<b>.txt").write_text((texts[0] / "0.txt").read_text())
    written = clean(tmp_path, "out", texts, "--rules=[exact]")
    rows = read(tmp_path / "out" / "dropped.jsonl")
    assert [(row["reason"], row["name"].partition(": ")[2]) for row in rows].count(("exact", "<b>.txt")) == 1
    assert sum(row["reason"] == "exact" for row in rows) == 2  # `same` of both folders, too
    page = written["report.html"].decode()
    assert "&lt;b&gt;.txt" in page
    assert "<b>.txt" not in page
    summary = json.loads(written["report.json"])
    assert summary["read"]["documents"] == summary["kept"]["documents"] + summary["dropped"]["documents"] == 17
    assert summary["read"]["bytes"] == summary["kept"]["bytes"] + summary["dropped"]["bytes"]


def test_of_near_duplicates_the_longest_is_kept(tmp_path, texts):
    pytest.importorskip("datasketch", reason="needs the extra [clean]")
    text = (texts[0] / "0.txt").read_text()
    (texts[0] / "longer.txt").write_text(text + " end")
    (texts[1] / "shorter.txt").write_text(text[:-3])
    first = clean(tmp_path, "out", texts, "--rules=[near]")
    rows = [row for row in read(tmp_path / "out" / "dropped.jsonl") if "longer" in row["kept"]]
    assert {row["name"].partition(": ")[2] for row in rows} == {"0.txt", "shorter.txt"}
    assert all(0.8 <= row["similarity"] < 1 for row in rows)
    assert clean(tmp_path, "again", texts[::-1], "--rules=[near]", "--processes=2") == first


def test_a_killed_command_continues_with_the_same_bytes(texts, tmp_path):
    whole = clean(tmp_path, "whole", texts, *SOME)
    script = (
        "import time, sys\n"
        "from jaxstack.cli.parser import execute\n"
        "from jaxstack.data.clean import cleaning, parts\n"
        "cleaning.CHUNK_DOCUMENTS = 2\n"
        "if sys.argv[1] == 'slow':\n"
        "    run = parts.RulesTask.run\n"
        "    parts.RulesTask.run = lambda task: (run(task), print('done', flush=True), time.sleep(60))\n"
        "execute(sys.argv[2:])\n"
    )
    words = ["data", "clean", *map(str, texts), str(tmp_path / "out"), "--processes=1", *SOME]
    command = [sys.executable, "-c", script]
    process = subprocess.Popen([*command, "slow", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    while process.stdout.readline() != "done\n":
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    part = tmp_path / "out" / "work" / "rules" / "000000.jsonl"
    part.write_text(part.read_text())  # its time
    before = part.stat().st_mtime_ns
    with pytest.raises(ConfigError, match="unfinished work of other settings"):
        execute([*words, "--quality.min_words=7"])
    assert part.stat().st_mtime_ns == before
    subprocess.run([*command, "fast", *words], check=True, capture_output=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == whole


def test_a_part_is_used_again_only_for_the_same_documents(tmp_path):
    settings = Settings(("quality",))
    task = parts.RulesTask(tmp_path / "a.jsonl", settings, [("a", "text of a")], None, ())
    task.run()
    assert parts.read_key(task.file) == task.key()
    assert task._replace(documents=[("a", "text of b")]).key() != task.key()
    assert parts.read_key(tmp_path / "none") == ""


def test_processes_end_with_the_command(tmp_path):
    """A process that waits for tasks ends with its standard input, which the system closes for a killed command."""
    process = subprocess.Popen([sys.executable, "-m", "jaxstack.data.clean.workers"], stdin=subprocess.PIPE)
    time.sleep(0.1)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0


def test_tasks_survive_their_way_to_another_process(tmp_path):
    settings = Settings(("c4", "near"), c4=C4Rules(min_sentences=2), language=LanguageRules(keep=("en",)))
    assert from_dict(settings.as_dict()) == settings
    for task in (
        parts.RulesTask(tmp_path / "a", settings, [("n", "té\nxt")], tmp_path / "e", ("w",)),
        parts.EditTask(tmp_path / "b", settings, tmp_path / "a", {0: [], 3: [1, 2]}, frozenset({"aa"})),
    ):
        again = decode(encode(task))
        assert again.key() if isinstance(task, parts.RulesTask) else again.sentences == task.sentences
        assert again.file == task.file
        assert again.settings == settings


def test_language(tmp_path):
    pytest.importorskip("py3langid", reason="needs the extra [clean]")
    (tmp_path / "texts").mkdir()
    english = "This is a text about the weather in the north of the country, where it often rains in the winter."
    german = "Dies ist ein Text über das Wetter im Norden des Landes, wo es im Winter oft regnet und selten schneit."
    (tmp_path / "texts" / "english.txt").write_text(english * 3)
    (tmp_path / "texts" / "german.txt").write_text(german * 3)
    clean(tmp_path, "out", [tmp_path / "texts"], "--rules=[]", "--language.keep=[de]")
    assert [row["text"] for row in read(tmp_path / "out" / "kept.jsonl")] == [german * 3]
    assert read(tmp_path / "out" / "dropped.jsonl")[0]["reason"] == "language.keep"
    with pytest.raises(ConfigError, match=r"language\.keep=xx is not a code"):
        clean(tmp_path, "other", [tmp_path / "texts"], "--language.keep=[xx]", "--rules=[]")


def test_tables_are_read_as_by_the_other_commands(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs the extra [hf]")
    rows = [{"body": f"{i} words of the text and that" * 3} for i in (1, 2, 1)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    flags = ["--rules=[exact]", "--data.source=hf", "--data.hf_column=body"]
    clean(tmp_path, "out", [tmp_path / "rows.jsonl"], *flags)
    clean(tmp_path, "out2", [tmp_path / "rows.parquet"], *flags)
    kept = (tmp_path / "out" / "kept.jsonl").read_bytes()
    assert kept == (tmp_path / "out2" / "kept.jsonl").read_bytes()
    assert len(kept.splitlines()) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--quality.min_words=-1"], r"quality\.min_words=-1 is out of range"),
        (["--rules=[exact]", "--quality.min_words=3"], r"min_words=3 has no effect, because --rules=\[exact\] is"),
        (["--language.min_probability=0.5"], r"the keys of the group language have no effect without language\.keep"),
        (["--overlap.ngram=8"], r"group overlap have no effect without overlap\.texts"),
        (["--rules=[quality,c4]", "--c4.bad_words=/nowhere/x"], r"c4\.bad_words=/nowhere/x cannot be read"),
        (["--near.hashes=1"], r"near\.hashes=1 cannot tell"),
        (["--rules=[best]"], r"--rules=best is not valid. Use a list of quality, repetition, c4, exact, near"),
        (["--overlap.texts=[/nowhere/x.txt]"], r"overlap\.texts=/nowhere/x.txt does not exist"),
        (["--language.keep=[english]"], r"language\.keep=english is not a code"),
    ],
)
def test_mistakes(texts, tmp_path, flags, message):
    if any(flag.startswith("--language.keep") for flag in flags):
        pytest.importorskip("py3langid", reason="needs the extra [clean]")
    if not any("near.hashes" in flag or "rules" in flag for flag in flags):
        flags = [*flags, "--rules=[quality]"]
    with pytest.raises(ConfigError, match=message):
        clean(tmp_path, "out", texts, *flags)
    assert not (tmp_path / "out").exists()


def test_a_text_that_cannot_be_read_leaves_no_folder(texts, tmp_path):
    """The corrected command may have other sources, which a folder with work of the first command would refuse."""
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        clean(tmp_path, "out", [tmp_path / "empty"], *SOME)
    assert not (tmp_path / "out").exists()
    clean(tmp_path, "out", texts, *SOME)


def test_a_missing_library_is_named(texts, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(ConfigError, match=r"Run pip install 'jaxstack\[clean\]'"):
        clean(tmp_path, "out", texts)


def test_a_folder_is_never_overwritten(texts, tmp_path):
    clean(tmp_path, "out", texts, *SOME)
    with pytest.raises(ConfigError, match="exists and is never overwritten"):
        clean(tmp_path, "out", texts, *SOME)
    os.mkdir(tmp_path / "other")
    (tmp_path / "other" / "file").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is never overwritten"):
        clean(tmp_path, "other", texts, *SOME)
