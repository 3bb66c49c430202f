"""Calibration data: what becomes a row, what becomes a window, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BatchEncoding, PreTrainedTokenizerFast

from ongrid.errors import CalibrationError
from ongrid.hf.batches import Batches, batches, windows

WORDS = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(47))]
BOS, EOS = 1, 2
PLAIN = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
WITH_BOS = "{{ bos_token }} " + PLAIN


def tokenizer(*, bos: bool = True, template: str | None = None) -> PreTrainedTokenizerFast:
    """One id per word, padding with EOS; adds a BOS to texts if `bos`."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = template
    return fast


def text(*numbers: int) -> str:
    return " ".join(f"w{n}" for n in numbers)


def ids(*numbers: int) -> list[int]:
    return [3 + n for n in numbers]


def made(data, *, by=None, seqlen: int = 8, **settings) -> Batches:
    settings = {"hidden_bytes": 1, "batch_bytes": 1000} | settings
    return batches(data, tokenizer() if by is None else by, seqlen=seqlen, **settings)


def rows(found: Batches) -> list[list[int]]:
    """The unpadded rows, by a walk over every position."""
    out = []
    for batch in found:
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        for i in range(len(mask)):
            out.append([int(t) for t, m in zip(batch["input_ids"][i], mask[i], strict=True) if m])
    return out


def jsonl(path: Path, *lines) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


# Windows of one text


def test_a_text_file_becomes_windows_without_bos_that_touch_and_never_overlap(tmp_path):
    numbers = [random.Random(0).randrange(47) for _ in range(30)]
    path = tmp_path / "long.txt"
    path.write_text(text(*numbers[:11]) + "\n\n" + text(*numbers[11:]))
    expected = [ids(*numbers[i : i + 7]) for i in range(0, 28, 7)]
    found = made(path, seqlen=7)
    assert rows(found) == expected
    assert (found.rows, found.tokens, found.blank) == (4, 28, 0)
    assert all(list(batch) == ["input_ids"] for batch in found)
    assert windows(path, tokenizer(), 7).tolist() == expected
    assert windows(path.read_text(), tokenizer(), 7, rows=2).tolist() == expected[:2]
    assert rows(made(str(path), seqlen=7, rows=2)) == expected[:2]
    assert windows(path, tokenizer(), 7).dtype == torch.int64


def test_a_text_shorter_than_a_window_names_file_count_and_remedy(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text(text(*range(5)))
    with pytest.raises(CalibrationError, match=r"short\.txt.*5 tokens in windows of 8") as caught:
        made(path)
    assert "--seqlen 5" in str(caught.value)
    with pytest.raises(CalibrationError, match="0 are usable"):
        windows("", tokenizer(), 8)


def test_fewer_windows_than_asked_is_an_error_with_counts(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text(text(*range(20)))
    with pytest.raises(
        CalibrationError, match=r"4 rows were asked for, 2 are usable \(20 tok"
    ) as e:
        made(path, rows=4)
    assert "--seqlen 5" in str(e.value) and "at most 2 rows" in str(e.value)


# Rows, and their one BOS


@pytest.mark.parametrize("template", [PLAIN, WITH_BOS])
@pytest.mark.parametrize("bos", [True, False])
def test_whole_rows_have_the_one_bos_that_tokenizer_or_template_give(template, bos):
    by = tokenizer(bos=bos, template=template)
    messages = [{"role": "user", "content": text(1, 2)}, {"role": "assistant", "content": "w3"}]
    chat = [BOS] * (bos or template == WITH_BOS) + ids(1, 2, 3)
    assert rows(made([{"messages": messages}], by=by)) == [chat]
    assert rows(made([text(4, 5)], by=by)) == [[BOS] * bos + ids(4, 5)]
    assert rows(made(["<s> " + text(4, 5)], by=by)) == [[BOS, *ids(4, 5)]]
    assert rows(made([text(*range(20))], by=by)) == [([BOS] * bos + ids(*range(8)))[:8]]


def test_given_ids_are_used_as_they_are():
    data = [[BOS, BOS, 5], ids(7), torch.tensor([9, 2, 9]), {"input_ids": [4, EOS, EOS]}]
    assert sorted(rows(made(data))) == sorted([[BOS, BOS, 5], ids(7), [9, 2, 9], [4, EOS, EOS]])
    assert rows(batches([[1, 2]], None, seqlen=4, hidden_bytes=1)) == [[1, 2]]
    given = torch.arange(12).view(3, 4)
    assert rows(made(given)) == given.tolist()
    found = made(given, seqlen=3)
    found.batches[0]["input_ids"].zero_()
    assert given.tolist() == torch.arange(12).view(3, 4).tolist()


def test_jsonl_and_saved_datasets_read_like_lists(tmp_path):
    by = tokenizer(template=WITH_BOS)
    data = [
        {"text": text(1, 2), "source": "a"},
        {"text": None, "messages": [{"role": "user", "content": "w9"}]},
        {"text": "  \n"},
        {"input_ids": [7, 8], "attention_mask": [1, 1], "text": "ignored"},
        {"input_ids": []},
        {"messages": []},
    ]
    expected = made(data, by=by)
    assert sorted(rows(expected)) == sorted([[BOS, *ids(1, 2)], [BOS, *ids(9)], [7, 8]])
    assert (expected.rows, expected.tokens, expected.blank) == (3, 7, 3)
    assert "3 blank rows dropped" in str(expected)
    path = jsonl(tmp_path / "rows.jsonl", *data, "")
    assert rows(made(path, by=by)) == rows(made(str(path), by=by)) == rows(expected)
    assert made(path, by=by).blank == 4


def test_datasets_are_found_in_folders(tmp_path, monkeypatch):
    import datasets
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    lines = [{"text": text(n)} for n in range(4)]
    saved = datasets.Dataset.from_list(lines)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": saved, "test": saved.select([3])}).save_to_disk(tmp_path / "two")
    (tmp_path / "three").mkdir()
    jsonl(tmp_path / "three" / "train.jsonl", *lines)
    expected = [[BOS, *ids(n)] for n in range(4)]
    for folder in ("one", "two", "three"):
        assert rows(made(tmp_path / folder)) == expected
    assert rows(made(saved)) == expected
    assert rows(made(f"{tmp_path / 'two'}::test")) == expected[3:]
    with pytest.raises(CalibrationError, match=r"no split 'dev' but \['test', 'train'\]"):
        made(f"{tmp_path / 'two'}::dev")
    (tmp_path / "none").mkdir()
    for name in (tmp_path / "none", "nobody/has-this", "nobody/has-this:config:split"):
        with pytest.raises(CalibrationError, match=f"{name}: not loaded"):
            made(name)


# Masks


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_either_side_is_cut_off_and_eos_inside_a_row_stays(side):
    short, long = ids(1, 2, 3, 4, 5, 6, 7), [5, 6, EOS, 7, 8, 9, 10, 11, EOS, 4, 5, EOS]
    ids_and_mask = [(long, [1] * 12), ([EOS] * 5 + short, [0] * 5 + [1] * 7)]
    if side == "right":
        ids_and_mask[1] = (short + [EOS] * 5, [1] * 7 + [0] * 5)
    given, masks = (torch.tensor(part) for part in zip(*ids_and_mask, strict=True))
    encoded = BatchEncoding({"input_ids": given, "attention_mask": masks})
    (batch,) = made(encoded, seqlen=12)
    assert batch["input_ids"].tolist() == [long, short + [0] * 5]
    assert batch["attention_mask"].tolist() == [[1] * 12, [1] * 7 + [0] * 5]
    assert made([encoded], seqlen=12).tokens == 19
    assert sorted(rows(made(encoded, seqlen=6))) == sorted([long[:6], short[:6]])


def test_a_hole_in_a_mask_is_kept():
    (batch,) = made([{"input_ids": [9, 5, 6, 7, 8], "attention_mask": [0, 1, 0, 1, 0]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7]]
    assert batch["attention_mask"].tolist() == [[1, 0, 1]]
    found = made([{"input_ids": [5, 6, 7], "attention_mask": [True, False, True]}], seqlen=2)
    assert (rows(found), found.tokens, list(found.batches[0])) == ([[5]], 1, ["input_ids"])
    assert made([{"input_ids": [4], "attention_mask": [0]}, [4]]).blank == 1


# Batches


def test_batches_keep_to_the_budget_and_pad_only_where_lengths_differ():
    chance = random.Random(1)
    data = [[chance.randrange(50) for _ in range(chance.randrange(1, 9))] for _ in range(60)]
    found = made(data, hidden_bytes=10, batch_bytes=250)
    expected = sorted(data, key=len, reverse=True)  # stable
    assert rows(found) == expected
    at = 0
    for batch in found:
        n, width = batch["input_ids"].shape
        group = expected[at : at + n]
        assert width == max(map(len, group))
        assert n == min(max(1, 250 // (10 * width)), 60 - at)
        assert ("attention_mask" in batch) == (len({len(row) for row in group}) > 1)
        assert all(tensor.dtype == torch.int64 for tensor in batch.values())
        at += n
    assert (at, len(found)) == (60, len(found.batches))
    for budget, sizes in {1: [1] * 5, 159: [1] * 5, 160: [2, 2, 1], 1000: [5]}.items():
        found = made([[1] * 8] * 5, hidden_bytes=10, batch_bytes=budget)
        assert [len(batch["input_ids"]) for batch in found] == sizes


@pytest.mark.parametrize(("most", "sizes"), [(1, [1] * 5), (2, [2, 2, 1]), (9, [3, 2])])
def test_a_batch_has_no_more_rows_than_asked_for(most: int, sizes: list[int]):
    """Nor more than fit its bytes."""
    found = made([[1] * 8] * 5, hidden_bytes=10, batch_bytes=240, batch_rows=most)
    assert [len(batch["input_ids"]) for batch in found] == sizes


def test_reading_stops_at_the_rows_asked_for():
    def endless():
        while True:
            yield text(1)
            yield " "

    assert made(endless(), rows=3).blank == 2


def test_too_few_rows_is_an_error_with_real_counts():
    data = [text(1, 2), "", text(3), " ", "\n", text(4)]
    with pytest.raises(CalibrationError) as caught:
        made(data, rows=128)
    counts = "128 rows were asked for, 3 are usable (7 tokens, 3 blank rows dropped)"
    assert counts in str(caught.value)
    with pytest.raises(CalibrationError, match="0 are usable"):
        made([])


# What is refused


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([5, -1], "-1 is not in the vocabulary of 50"),
        ([5, 50], "50 is not in the vocabulary of 50"),
        ([5, 2**70], "does not hold integers"),
        ([5, float("nan")], "torch.float32"),
        ([5.0], "torch.float32"),
        ([True], "torch.bool"),
        ([[5], [6, 7]], "does not hold integers"),
        ([[[5]]], r"\[1, 1, 1\]"),
        (None, "does not hold integers"),
        ({"input_ids": [5, 6], "attention_mask": [1]}, "attention_mask"),
        ({"input_ids": [5, 6], "attention_mask": [1, 2]}, "0 or 1"),
        ({"input_ids": [5, 6], "attention_mask": [0.0, 1.0]}, "torch.float32"),
        ({"text": 7}, "`text` is a int"),
        ({"content": "w1"}, r"columns \['content'\]"),
        ({"messages": [{"role": "user"}], "text": "w1"}, "chat template"),
    ],
)
def test_a_bad_row_is_refused_by_number(row, message):
    with pytest.raises(CalibrationError, match=f"(?s)row 2.*{message}"):
        made([[1, 2], row])


def test_files_that_cannot_be_read_are_named_with_their_lines(tmp_path):
    by = tokenizer(template="{{ raise_exception('roles must alternate') }}")
    path = jsonl(tmp_path / "chat.jsonl", {"messages": [{"role": "user", "content": "w1"}]})
    with pytest.raises(CalibrationError, match=r"chat\.jsonl:1.*roles must alternate"):
        made(path, by=by)
    broken = jsonl(tmp_path / "broken.jsonl", {"text": "w1"}, '{"text": ')
    with pytest.raises(CalibrationError, match=r"broken\.jsonl:2"):
        made(broken)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for name in ("latin.txt", "absent.txt", "absent.jsonl"):
        with pytest.raises(CalibrationError, match=name):
            made(tmp_path / name)
    (tmp_path / "rows.csv").write_text("text\nw1\n")
    with pytest.raises(CalibrationError, match=r"rows\.csv: not a kind of file"):
        made(tmp_path / "rows.csv")


def test_texts_need_a_tokenizer_and_counts_are_positive(tmp_path):
    (tmp_path / "a.txt").write_text(text(*range(9)))
    for data in (["w1"], tmp_path / "a.txt"):
        with pytest.raises(CalibrationError, match="needs a tokenizer"):
            batches(data, None, seqlen=4, hidden_bytes=1)
    with pytest.raises(CalibrationError, match="-1 is not in the vocabulary"):
        batches([[-1]], None, seqlen=4, hidden_bytes=1)
    with pytest.raises(CalibrationError, match="of 4"):
        made([[4]], vocab_size=4)
    for name in ("seqlen", "rows", "hidden_bytes"):
        with pytest.raises(CalibrationError, match=name):
            made([[1]], **{name: 0})
