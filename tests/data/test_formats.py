"""Files and rows of every format, and the sentence for each that cannot be used."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from corpora import MARKED, hf_tokenizer, make_batches, trained_text, write_rows

from greedysnake.data.batches import Batches
from greedysnake.data.files import find_sources, standard_library_files, standard_library_text
from greedysnake.data.options import DataOptions
from greedysnake.data.rows import PART_CHARACTERS
from greedysnake.data.tokenizers import ByteTokenizer
from greedysnake.errors import ConfigError


def texts_of(batches: Batches) -> list[str]:
    """Documents in the order of the files; needs packing=False."""
    rows = [row for batch in batches.iter_all() for row in batch["input_ids"].tolist()]
    found = [ByteTokenizer().decode(row, skip_special_tokens=True) for row in rows]
    return [text for text in found if text]


def read(tmp_path: Path, *paths: Path, **changes: Any) -> list[str]:
    return texts_of(make_batches(tmp_path / "cache", list(paths), packing=False, **changes))


def test_json_lines_json_lists_and_text_files_are_read(tmp_path: Path) -> None:
    lines = write_rows(tmp_path / "a.jsonl", {"text": "one"}, "", {"text": "zwölf", "other": 1})
    (tmp_path / "b.json").write_text(json.dumps([{"text": "three"}, {"text": "four"}], indent=2))
    write_rows(tmp_path / "c.json", {"text": "five"})
    (tmp_path / "d.txt").write_text("six\nseven\r\n", newline="")
    (tmp_path / "e.py").write_text("print(8)\n")
    assert read(tmp_path, lines) == ["one", "zwölf"]
    paths = [tmp_path / name for name in ("b.json", "c.json", "d.txt", "e.py")]
    assert read(tmp_path, *paths) == ["three", "four", "five", "six\nseven\r\n", "print(8)\n"]


def test_a_long_text_ends_once_whatever_blank_lines_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greedysnake.data.rows.PART_CHARACTERS", 8)
    (tmp_path / "a.txt").write_text("some text\n" + "\n" * 20 + "and more\n" + "\n" * 40)
    batches = make_batches(tmp_path / "cache", [tmp_path / "a.txt"], packing=False)
    tokens = [token for batch in batches.iter_all() for row in batch["input_ids"].tolist() for token in row]
    assert tokens.count(ByteTokenizer.eos_token_id) == 1
    assert ByteTokenizer().decode(tokens, skip_special_tokens=True).split() == ["some", "text", "and", "more"]


def test_parts_of_a_long_text_file_are_tokenised_side_by_side(tmp_path: Path) -> None:
    """A text is the work of one thread."""

    counts: list[int] = []

    class Counting(ByteTokenizer):
        def __call__(self, text: list[str], *, add_special_tokens: bool = True) -> Any:
            counts.append(len(text))
            return super().__call__(text)

    (tmp_path / "long.txt").write_text("a line of text\n" * (4 * PART_CHARACTERS // 15))
    make_batches(tmp_path / "cache", tmp_path / "long.txt", Counting(), sequence_length=4096)
    assert counts == [4]


def test_folders_and_globs_are_sorted_and_a_file_counts_once(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for name in ("z.txt", "a/x.md", "a/.hidden.txt", ".git/config.txt", "__pycache__/y.py", "image.png", "a/b.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    names = ["a/b.py", "a/x.md", "z.txt"]
    assert [source.path for source in find_sources("data.paths", [str(folder)])] == [folder / name for name in names]
    patterns = [str(folder / "**" / "*.md"), str(folder), str(folder / "image.png"), str(folder / "a" / ".." / "z.txt")]
    found = [source.path.name for source in find_sources("data.paths", patterns)]
    assert found == ["x.md", "b.py", "z.txt", "image.png"]


def test_a_folder_reaches_through_links_and_each_file_counts_once(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("a")
    (tmp_path / "data").mkdir()
    for name, target in (("one", "elsewhere"), ("two", "elsewhere"), ("back", "data")):
        (tmp_path / "data" / name).symlink_to(tmp_path / target)
    assert [source.path.name for source in find_sources("data.paths", [str(tmp_path / "data")])] == ["a.txt"]


def test_the_page_about_a_data_set_is_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "rows.jsonl", {"text": "one"})
    (tmp_path / "README.md").write_text("about the data")
    told = r"data.paths: folder .* has rows, such as rows.jsonl, and texts, such as README.md: .*\*\*/\*.jsonl'"
    with pytest.raises(ConfigError, match=told):
        make_batches(tmp_path / "cache", tmp_path)


def test_no_part_of_the_data_is_left_out_in_silence(tmp_path: Path) -> None:
    write_rows(tmp_path / "one.jsonl", {"text": "one"})
    (tmp_path / "model.tar.gz").write_bytes(b"no data by its name")
    assert read(tmp_path, tmp_path) == ["one"]
    (tmp_path / "two.jsonl").symlink_to(tmp_path / "gone")
    for path in (tmp_path, tmp_path / "*.jsonl"):
        with pytest.raises(ConfigError, match=r"two.jsonl cannot be read \(.*\): correct the link"):
            make_batches(tmp_path / "cache", path)
    (tmp_path / "two.jsonl").unlink()
    (tmp_path / "two.jsonl.gz").write_bytes(gzip.compress(b'{"text": "two"}'))
    with pytest.raises(ConfigError, match=r"two.jsonl.gz is compressed, which is not read: unpack it"):
        make_batches(tmp_path / "cache", tmp_path)


def test_a_mark_of_the_byte_order_is_no_text(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", '{"text": "one"}\n'), ("b.json", '[{"text": "two"}]'), ("c.txt", "three")):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read(tmp_path, *sorted(tmp_path.iterdir())) == ["one", "two", "three"]


def test_parquet_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"prompt": [f"{n}+1=" for n in range(600)], "completion": [str(n + 1) for n in range(600)]})
    parquet.write_table(table, tmp_path / "sums.parquet", row_group_size=100)
    batches = make_batches(tmp_path / "cache", tmp_path / "sums.parquet", packing=False)
    assert trained_text(ByteTokenizer(), batches) == [f"{number + 1}<|end|>" for number in range(600)]
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(ConfigError, match=r"broken.parquet cannot be read as parquet"):
        make_batches(tmp_path / "cache", tmp_path / "broken.parquet")


def test_columns_of_parquet_that_nobody_asks_for_are_not_read(tmp_path: Path) -> None:
    """Nor could they: a time in nanoseconds is no value of Python's."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    times = pyarrow.array([2**62 + 1], pyarrow.timestamp("ns"))
    parquet.write_table(pyarrow.table({"text": ["one"], "created_at": times}), tmp_path / "a.parquet")
    assert read(tmp_path, tmp_path / "a.parquet") == ["one"]
    parquet.write_table(pyarrow.table({"body": ["one"], "created_at": times}), tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match=r"b.parquet row 1: no column .* \(it has 'body', 'created_at'\)"):
        read(tmp_path, tmp_path / "b.parquet")


def test_parquet_that_is_damaged_inside_is_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    no_text = pyarrow.StringArray.from_buffers(1, *pyarrow.array([b"\xff\xfe"]).buffers()[1:])
    parquet.write_table(pyarrow.table({"text": no_text}), tmp_path / "bytes.parquet")
    parquet.write_table(pyarrow.table({"text": ["some words"] * 100}), tmp_path / "cut.parquet", compression="none")
    content = bytearray((tmp_path / "cut.parquet").read_bytes())
    content[4:40] = bytes(36)
    (tmp_path / "cut.parquet").write_bytes(content)
    for name in ("bytes.parquet", "cut.parquet"):
        with pytest.raises(ConfigError, match=f"{name} cannot be read as parquet .*: write it anew"):
            read(tmp_path, tmp_path / name)


@pytest.mark.parametrize(("package", "file"), [("pyarrow", "x.parquet"), ("datasets", "saved")])
def test_a_missing_package_is_named(tmp_path: Path, package: str, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "saved").mkdir()
    for name in ("x.parquet", "saved/state.json", "saved/dataset_info.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=f"{file}.* needs the package {package}: pip install {package}"):
        make_batches(tmp_path / "cache", tmp_path / file)


def test_a_data_set_saved_to_disk_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": []}).save_to_disk(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match=r"empty cannot be read as a data set, or has no rows"):
        read(tmp_path, tmp_path / "empty")
    rows = datasets.Dataset.from_dict({"text": ["one", "two"]})
    rows.save_to_disk(str(tmp_path / "saved"))
    assert read(tmp_path, tmp_path / "saved") == ["one", "two"]
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(ConfigError, match=r"several splits of a data set \(test, train\): give the folder of one"):
        read(tmp_path, tmp_path / "both")
    assert read(tmp_path, tmp_path / "both" / "train") == ["one", "two"]


def test_columns_can_have_other_names(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"question": "1+1=", "answer": "2", "text": "unused"})
    names = {"prompt_column": "question", "completion_column": "answer"}
    batches = make_batches(tmp_path / "cache", path, **names)
    assert trained_text(ByteTokenizer(), batches) == ["2<|end|>"]
    batches = make_batches(tmp_path / "cache", path, text_column="answer", format="text")
    assert texts_of(batches) == ["2"]


def test_the_completion_alone_carries_loss_even_where_a_token_spans_the_border(tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(None, merges_from=["the cat sat on the mat"] * 50)
    (whole,) = tokenizer(["on the cat"], add_special_tokens=False)["input_ids"]
    assert len(whole) == 3  # "on", " the", " cat": the prompt below ends inside of the last
    path = write_rows(
        tmp_path / "a.jsonl", {"prompt": "on the c", "completion": "at"}, {"prompt": "", "completion": "a"}
    )
    batches = make_batches(tmp_path / "cache", path, tokenizer, packing=False)
    assert trained_text(tokenizer, batches) == [" cat<|end|>", "<|end|>"]


def test_a_column_that_is_null_is_not_the_rows_kind(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"text": "one", "messages": None, "prompt": None, "completion": None})
    assert read(tmp_path, path) == ["one"]


def test_the_end_token_is_added_once_or_not_at_all(tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(None)
    path = write_rows(tmp_path / "a.jsonl", {"text": "ends<|end|>"}, {"text": "does not"})
    for add_eos, expected in ((True, ["ends<|end|>", "does not<|end|>"]), (False, ["ends<|end|>", "does not"])):
        batches = make_batches(tmp_path / "cache", path, tokenizer, packing=False, add_eos=add_eos)
        rows = [row for batch in batches.iter_all() for row in batch["input_ids"].tolist()]
        assert [tokenizer.decode([token for token in row if token != 0]) for row in rows] == expected
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match=r"no end token \(eos_token\): set data.add_eos to false"):
        make_batches(tmp_path / "cache", path, tokenizer)


BAD_ROWS = {
    "{'text': 1}": "not valid JSON (Expecting property name enclosed in double quotes at character 2)",
    '{"text": "a"': "not valid JSON (Expecting ',' delimiter at character 13)",
    "[1]": "list, not an object with columns",
    "["
    * 100_000: "not valid JSON (maximum recursion depth exceeded while decoding a JSON array from a unicode string)",
    '{"text": ' + "1" * 5000 + "}": (
        "not valid JSON (Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits; use "
        "sys.set_int_max_str_digits() to increase the limit)"
    ),
    '{"body": "a"}': "no column 'messages' or 'prompt' and 'completion' or 'text' (it has 'body')",
    "{}": "no column 'messages' or 'prompt' and 'completion' or 'text' (it is empty)",
    '{"text": 5}': "int in column 'text', not text",
    '{"text": null}': "nothing in column 'text', not text",
    '{"text": " \\n"}': "no text in column 'text'",
    '{"text": "\\ud800"}': "half of a surrogate pair in column 'text', which is no character",
    '{"prompt": "a", "completion": ""}': "no text in column 'completion'",
    '{"messages": "hello"}': "str in column 'messages', not a list of messages",
    '{"messages": []}': "no messages in column 'messages'",
    '{"messages": [{"content": "a"}]}': "no role in message 1 of column 'messages'",
    '{"messages": [{"role": "user"}]}': "no content in message 1 of column 'messages'",
    '{"messages": [{"role": "king", "content": "a"}]}': (
        "the chat template does not take these messages (role 'king' is not system, user, assistant or tool)"
    ),
}


@pytest.mark.parametrize("line", BAD_ROWS, ids=lambda line: line[:20])
def test_a_bad_row_is_named_with_file_and_line(tmp_path: Path, line: str) -> None:
    path = write_rows(tmp_path / "data.jsonl", {"text": "good"}, line, {"text": "good as well"})
    with pytest.raises(ConfigError) as caught:
        make_batches(tmp_path / "cache", path)
    told = f"{path} line 2: {BAD_ROWS[line]}: fix the row, or raise data.max_bad_rows (now 0)"
    assert str(caught.value) == told
    batches = make_batches(tmp_path / "cache", path, max_bad_rows=1, packing=False)
    assert texts_of(batches) == ["good", "good as well"]
    assert batches.report.num_bad_rows == 1 and batches.report.bad_rows == (f"{path} line 2: {BAD_ROWS[line]}",)
    assert "skipped 1 bad rows" in str(batches.report)
    # The cache was made when the limit was higher: it still holds.
    with pytest.raises(ConfigError, match=re.escape(told)):
        make_batches(tmp_path / "cache", path)


def test_the_row_beyond_the_limit_is_the_one_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", "{", {"text": "good"}, "{", "{")
    with pytest.raises(ConfigError, match=r"data.jsonl line 4: .* \(now 2\)"):
        make_batches(tmp_path / "cache", path, max_bad_rows=2)


def test_files_that_are_not_text_are_bad_rows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    write_rows(tmp_path / "b.jsonl", {"text": "good"})
    (tmp_path / "c.json").write_text("[1, 2")
    (tmp_path / "d.json").write_text('[{"text": "fine"}, {"text": 3}]')
    batches = make_batches(tmp_path / "cache", sorted(tmp_path.iterdir()), max_bad_rows=3, packing=False)
    assert texts_of(batches) == ["good", "fine"]
    assert [row.split("/")[-1] for row in batches.report.bad_rows] == [
        "a.txt: not UTF-8 text (byte 0xe9)",
        "c.json: not valid JSON (Expecting ',' delimiter at character 6)",
        "d.json row 2: int in column 'text', not text",
    ]


def test_a_json_file_of_one_object_is_told_what_it_should_hold(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"text": "fine"}, indent=2))
    with pytest.raises(ConfigError) as caught:
        make_batches(tmp_path / "cache", path)
    assert str(caught.value).startswith(
        f"{path}: one object over several lines, where a list of objects or one object per line is expected: fix"
    )
    path.write_text(json.dumps({"text": "fine"}))  # in one line it is one row
    assert texts_of(make_batches(tmp_path / "cache", path)) == ["fine"]


def test_empty_files_are_not_rows(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "a.py").write_text("import b\n")
    assert make_batches(tmp_path / "cache", tmp_path).report.num_rows == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.jsonl", "data.paths: '.*missing.jsonl' does not exist: check the path"),
        ("*.none", "data.paths: no file matches '.*none': check the pattern"),
        ("nothing", "data.paths: folder '.*nothing' has no data files: put .jsonl"),
        ("empty.jsonl", "data.paths: no rows in '.*empty.jsonl': the files are empty"),
        ("rows.jsonl.gz", "rows.jsonl.gz is compressed, which is not read: unpack it"),
        ("pipe", "pipe is neither a file nor a folder: put the data into a file"),
        ("/dev/zero", "/dev/zero is neither a file nor a folder: put the data into a file"),
    ],
)
def test_what_is_not_there_is_said_in_one_sentence(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "nothing").mkdir()
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=message) as caught:
        make_batches(tmp_path / "cache", tmp_path / name)
    assert "\n" not in str(caught.value)


def test_rows_without_a_target_are_counted_and_a_data_set_without_any_is_refused(tmp_path: Path) -> None:
    question = {"role": "user", "content": "why?"}
    path = write_rows(tmp_path / "data.jsonl", {"messages": [question]}, {"messages": [question]})
    with pytest.raises(ConfigError, match=r"none of the 2 rows in .* has a token to train on: rows with messages need"):
        make_batches(tmp_path / "cache", path)
    write_rows(path, {"messages": [question]}, {"messages": [question, {"role": "assistant", "content": "so"}]})
    batches = make_batches(tmp_path / "cache", path)
    assert batches.report.num_rows_without_targets == 1 and batches.report.num_documents == 1
    assert batches.num_targets == 3
    with pytest.raises(ConfigError, match=r"1 of 1 documents are longer than sequence_length 4: raise it"):
        make_batches(tmp_path / "cache", path, sequence_length=4, long_documents="truncate")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"paths": []}, "data.paths is empty"),
        ({"paths": [3]}, "data.paths is [3]: give a list of files, folders or globs"),
        ({"format": "chat"}, "data.format is 'chat': it can be auto, text, prompt_completion, messages"),
        ({"pad_to": 8}, "data.pad_to is 8: it can be longest, sequence_length"),
        ({"text_column": ""}, "data.text_column is '': give the name of a column"),
        ({"max_bad_rows": -1}, "data.max_bad_rows is -1: give an integer, 0 or more"),
        ({"validation_share": 1.5}, "data.validation_share is 1.5: give a number from 0 to below 1"),
        ({"validation_share": 0.1, "validation_paths": "x"}, "are both given: give one of them"),
        ({"packing": "yes"}, "data.packing is 'yes': give true or false"),
    ],
)
def test_options_that_cannot_work_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        DataOptions(**values)


def test_options_take_lists_and_single_paths_and_need_no_torch() -> None:
    assert DataOptions(paths=["a", "b"]).paths == ("a", "b")  # type: ignore[arg-type]
    assert DataOptions(paths="a").paths == ("a",)  # type: ignore[arg-type]
    code = "import sys, greedysnake.data.options; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_a_chat_template_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"text": "one"})
    with pytest.raises(ConfigError, match=r"data.chat_template: 'none.jinja' cannot be read"):
        make_batches(tmp_path / "cache", path, hf_tokenizer(MARKED), chat_template="none.jinja")


def test_the_standard_library_is_the_default(tmp_path: Path) -> None:
    files = [file.as_posix() for file in standard_library_files()]
    assert len(files) > 300 and files == sorted(files) and any(name.endswith("/json/decoder.py") for name in files)
    assert not [name for name in files if re.search(r"/(site-packages|tests?|__pycache__)/|_sysconfigdata", name)]
    splits = {}
    for split in ("train", "validation"):
        options = DataOptions(validation_share=0.05)
        shape = {"sequence_length": 256, "micro_batch_size": 4, "seed": 0, "cache": tmp_path}
        splits[split] = Batches(options, ByteTokenizer(), split=split, **shape)  # type: ignore[arg-type]
    texts = standard_library_text()
    assert sum(one.report.num_documents for one in splits.values()) == len(texts)
    num_pieces_of_one_token = sum(one.report.num_pieces_without_targets for one in splits.values())
    num_tokens = sum(len(text.encode()) + 1 for text in texts) - num_pieces_of_one_token
    assert sum(one.num_tokens for one in splits.values()) == num_tokens
    assert 0.01 < splits["validation"].num_tokens / num_tokens < 0.15
    assert splits["train"].report.fill > 0.99
