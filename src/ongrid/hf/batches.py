"""Calibration data for any tokenizer: files, lists and datasets become batches of token ids.

Two shapes of data are kept apart. A text file is one long text: it is tokenised as a whole, without
special tokens, and cut into windows that touch and never overlap; no window gets a BOS, none is
padded, and the tail is dropped (a model that is lost without a BOS wants rows). Everything else is
rows: a row stays whole, begins with the one BOS that the tokenizer gives its texts, whatever a chat
template adds, and ends at `seqlen`. A mask is what the data says: no id is taken for padding.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ongrid.errors import CalibrationError
from ongrid.hf import text
from ongrid.hf.load import activation_bytes, load_config, load_tokenizer, local_folder

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_COLUMNS = ("input_ids", "messages", "text")  # the first that a row fills is taken


@dataclass(frozen=True)
class Batches:
    """Batches in walking order: `input_ids` and, where needed, `attention_mask`, int64 [rows, T].

    `rows` and `tokens` count what the model sees, without padding; `blank` counts the rows that
    held nothing and were dropped.
    """

    batches: tuple[dict[str, Tensor], ...]
    rows: int
    tokens: int
    blank: int

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __str__(self) -> str:
        dropped = f"; {self.blank} blank rows dropped" if self.blank else ""
        return f"{self.rows} rows, {self.tokens} tokens, {len(self)} batches{dropped}"


class _Row(NamedTuple):
    ids: Tensor
    mask: Tensor


def batches(
    data: str | Path | Mapping[str, Any] | Iterable[Any],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    seqlen: int,
    hidden_bytes: int,
    rows: int | None = None,
    batch_bytes: int = 80 << 20,
    batch_rows: int | None = None,
    vocab_size: int | None = None,
) -> Batches:
    """The first `rows` usable rows of `data` (None: all), in batches within a byte budget.

    `data` is a `.txt` file (windows), a `.jsonl` file, a folder or `name[:config[:split]]` of a
    dataset, or an iterable of rows. A row is a text, a list or tensor of token ids, or a mapping
    with `input_ids` (and `attention_mask`), `messages` or `text`; ids [n, T] are n rows. Given ids
    are used as they are, but for the masked positions at either end, which are cut off. Longest
    rows come first, equal ones in the order of the data. A batch is padded on the right to its
    longest row T and has max(1, batch_bytes // (T * hidden_bytes)) rows, or `batch_rows` if they
    are fewer; `hidden_bytes` are the bytes of one token's activations in one layer. Ids must be
    below `vocab_size`, by default the tokenizer's. Without texts the tokenizer may be None.

    Raises `CalibrationError` for fewer than `rows` usable rows, a text shorter than one window, ids
    outside the vocabulary, masks that do not fit their ids, and data that cannot be read.
    """
    _check_positive(seqlen=seqlen, hidden_bytes=hidden_bytes, rows=rows, batch_rows=batch_rows)
    if vocab_size is None and tokenizer is not None:
        vocab_size = len(tokenizer)
    name = str(data) if isinstance(data, str | Path) else "calibration data"
    if isinstance(data, str | Path) and Path(data).suffix == ".txt":
        if tokenizer is None:
            raise CalibrationError("text needs a tokenizer", where=name)
        data = windows(Path(data), tokenizer, seqlen, rows)
    usable, blank = [], 0
    for row in _rows(data, tokenizer, seqlen, vocab_size):
        if row is None:
            blank += 1
        else:
            usable.append(row)
        if len(usable) == rows:
            break
    if len(usable) < (rows or 1):
        tokens = sum(int(row.mask.sum()) for row in usable)
        raise CalibrationError(
            f"{rows or 'all'} rows were asked for, {len(usable)} are usable "
            f"({tokens} tokens, {blank} blank rows dropped)",
            where=name,
            remedy=f"Ask for {len(usable) or 'fewer'} rows, or give more text or token ids.",
        )
    return _grouped(usable, batch_bytes // hidden_bytes, batch_rows, blank)


def calibration_batches(
    model: str | Path,
    data: str | Path,
    *,
    seqlen: int,
    rows: int | None,
    batch_rows: int | None = None,
) -> Batches:
    """Batches of `data` for the model in a folder: its tokenizer, its vocabulary, its sizes.

    Arguments and errors are those of `batches`; `pydoc` stands for the text of `ongrid.hf.text`.
    Raises `StoreError` for a config or a tokenizer that is missing or broken, too.
    """
    folder = local_folder(model)
    config, tokenizer = load_config(folder), load_tokenizer(folder)
    vocab_size = config.get_text_config().vocab_size
    hidden_bytes = activation_bytes(config)
    source: Any = data
    if str(data) == text.NAME:
        ids = windows(text.calibration_text(), tokenizer, seqlen, rows)
        source, tokenizer = ids.tolist(), None
    return batches(
        source,
        tokenizer,
        seqlen=seqlen,
        hidden_bytes=hidden_bytes,
        rows=rows,
        batch_rows=batch_rows,
        vocab_size=vocab_size,
    )


def windows(
    source: str | Path, tokenizer: PreTrainedTokenizerBase, seqlen: int, rows: int | None = None
) -> Int[Tensor, "rows seqlen"]:
    """The first `rows` windows (None: all) of a text (`str`) or of a file (`Path`), int64.

    The text is tokenised as a whole without special tokens, so no window begins with a BOS; windows
    do not overlap and the tail is dropped. Raises `CalibrationError` with the counts if the text
    holds fewer windows than asked, or not one.
    """
    _check_positive(seqlen=seqlen, rows=rows)
    text = "".join(_lines(source)) if isinstance(source, Path) else source
    encoded = tokenizer(text, add_special_tokens=False, verbose=False, return_attention_mask=False)
    ids = encoded["input_ids"]
    held, asked = len(ids) // seqlen, rows or 1
    if held < asked:
        fitting = f" `--seqlen {len(ids) // asked}` or less," if len(ids) >= asked else ""
        fewer = f" at most {held} rows," if held else ""
        raise CalibrationError(
            f"{rows or 'all'} rows were asked for, {held} are usable "
            f"({len(ids)} tokens in windows of {seqlen})",
            where=str(source) if isinstance(source, Path) else "text",
            remedy=f"Use{fitting}{fewer} or a longer text (a `Path` is read, a `str` is the text).",
        )
    kept = rows or held
    return torch.tensor(ids[: kept * seqlen], dtype=torch.int64).view(kept, seqlen)


def _rows(
    data: Any, tokenizer: PreTrainedTokenizerBase | None, seqlen: int, vocab_size: int | None
) -> Iterator[_Row | None]:
    """Usable rows, and None for each blank one; errors name the line or the row."""
    for where, item in _items(data):
        try:
            ids, mask = _encode(item, tokenizer)
            if ids.shape != mask.shape or not bool(((mask == 0) | (mask == 1)).all()):
                raise CalibrationError(
                    f"`attention_mask` {list(mask.shape)} does not mark each of `input_ids` "
                    f"{list(ids.shape)} with 0 or 1"
                )
            made = [_row(i, m, seqlen, vocab_size) for i, m in zip(ids, mask, strict=True)]
        except CalibrationError as error:
            error.at(where)
            raise
        yield from made


def _items(data: Any) -> Iterator[tuple[str, Any]]:
    """Where a row stands, and the row as it is found there."""
    if isinstance(data, str | Path):
        path = Path(data)
        if path.suffix == ".jsonl":
            for number, line in enumerate(_lines(path), start=1):
                where = f"{path}:{number}"
                try:
                    yield where, json.loads(line) if line.strip() else []
                except json.JSONDecodeError as error:
                    raise CalibrationError(f"not a line of JSON: {error}", where=where) from error
            return
        data = _dataset(str(data))
    for number, row in enumerate([data] if isinstance(data, Mapping) else data, start=1):
        yield f"row {number} of the calibration data", row


def _encode(item: Any, tokenizer: PreTrainedTokenizerBase | None) -> tuple[Tensor, Tensor]:
    """Ids and mask of a row, or of the several rows in ids [n, T]; T = 0 for a blank one."""
    mask = None
    kind = "text" if isinstance(item, str) else "input_ids"
    if isinstance(item, Mapping):
        if not any(name in item for name in _COLUMNS):
            raise CalibrationError(
                f"neither `input_ids`, `messages` nor `text` among its columns {sorted(item)}",
                remedy="Rename the column that holds the text.",
            )
        kind = next((name for name in _COLUMNS if item.get(name) is not None), "")
        mask = item.get("attention_mask") if kind == "input_ids" else None
        item = item.get(kind, [])
    if kind in ("text", "messages"):
        item = _tokens(item, kind, tokenizer)
    ids = _integers(item, "input_ids")
    return ids, torch.ones_like(ids) if mask is None else _integers(mask, "attention_mask")


def _tokens(item: Any, kind: str, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Ids of a text, or of messages through the chat template; none for a blank text."""
    if tokenizer is None or (kind == "messages" and tokenizer.chat_template is None):
        template = " with a chat template" if kind == "messages" else ""
        raise CalibrationError(f"`{kind}` needs a tokenizer{template}", remedy="Or give token ids.")
    if kind == "messages":
        import jinja2  # only templates need it

        try:
            item = tokenizer.apply_chat_template(item, tokenize=False) if item else ""
        except (jinja2.TemplateError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CalibrationError(f"the chat template refuses `messages`: {error}") from error
    if not isinstance(item, str):
        raise CalibrationError(f"`text` is a {type(item).__name__}, not a text")
    if not item.strip():
        return []
    whole = kind == "text"  # a template writes its own special tokens
    ids = tokenizer(item, add_special_tokens=whole, verbose=False)["input_ids"]
    bos = tokenizer.bos_token_id
    if bos is None:
        return ids
    start = next((i for i, token in enumerate(ids) if token != bos), len(ids))
    wanted = start > 0 or tokenizer("")["input_ids"][:1] == [bos]
    return [bos] * wanted + ids[start:]


def _integers(values: Any, name: str) -> Int[Tensor, "n T"]:
    try:
        found = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CalibrationError(f"`{name}` does not hold integers: {error}") from error
    if found.numel() == 0:
        return torch.zeros(1, 0, dtype=torch.int64)
    boolean = name == "attention_mask" and found.dtype == torch.bool
    if not (boolean or found.dtype in _INTEGERS) or found.dim() not in (1, 2):
        raise CalibrationError(
            f"`{name}` holds {found.dtype} {list(found.shape)}, expected integers [T] or [n, T]"
        )
    return torch.atleast_2d(found).to("cpu", torch.int64)


def _row(ids: Tensor, mask: Tensor, seqlen: int, vocab_size: int | None) -> _Row | None:
    """At most `seqlen` positions, the first and the last unmasked; None where nothing is left."""
    if not bool(mask.any()):
        return None
    start = int(mask.argmax())
    stop = start + 1 + int(mask[start : start + seqlen].nonzero()[-1])
    ids, mask = ids[start:stop], mask[start:stop]
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= (vocab_size or high + 1):
        raise CalibrationError(
            f"token id {low if low < 0 else high} is not in the vocabulary"
            + f" of {vocab_size}" * bool(vocab_size),
            remedy="Tokenise the data with the tokenizer of this model.",
        )
    return _Row(ids, mask)


def _grouped(
    rows: list[_Row], tokens_per_batch: int, rows_per_batch: int | None, blank: int
) -> Batches:
    ordered = sorted(rows, key=lambda row: -len(row.ids))
    made: list[dict[str, Tensor]] = []
    start = 0
    while start < len(ordered):
        longest = len(ordered[start].ids)
        fitting = max(1, tokens_per_batch // longest)
        group = ordered[start : start + min(fitting, rows_per_batch or fitting)]
        ids, mask = (torch.zeros(len(group), longest, dtype=torch.int64) for _ in range(2))
        for i, row in enumerate(group):
            ids[i, : len(row.ids)], mask[i, : len(row.ids)] = row.ids, row.mask
        masked = {} if bool(mask.all()) else {"attention_mask": mask}
        made.append({"input_ids": ids, **masked})
        start += len(group)
    tokens = sum(int(row.mask.sum()) for row in rows)
    return Batches(tuple(made), rows=len(rows), tokens=tokens, blank=blank)


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"cannot be read as UTF-8 text: {error}", where=str(path)) from error


def _dataset(name: str) -> Iterable[Any]:
    """The rows of a saved dataset, or of what `datasets` finds under `name[:config[:split]]`."""
    remedy = "Give a .txt or .jsonl file, a folder, or name[:config[:split]] of a dataset."
    if Path(name).is_file() or Path(name).suffix in (".json", ".csv", ".parquet"):
        raise CalibrationError("not a kind of file that is read", where=name, remedy=remedy)
    import datasets  # takes seconds to import
    from datasets.exceptions import DatasetsError

    path, config, split = (*name.split(":"), "", "")[:3]
    split = split or "train"
    failures = (DatasetsError, OSError, RuntimeError, ValueError)
    try:
        if not any((Path(path) / file).exists() for file in ("state.json", "dataset_dict.json")):
            return datasets.load_dataset(path, config or None, split=split)
        found = datasets.load_from_disk(path)
    except failures as error:
        raise CalibrationError(f"not loaded: {error}", where=name, remedy=remedy) from error
    if isinstance(found, Mapping) and split not in found:
        raise CalibrationError(f"has no split {split!r} but {sorted(found)}", where=name)
    return found[split] if isinstance(found, Mapping) else found


def _check_positive(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise CalibrationError(f"`{name}` is {count}, expected 1 or more")
