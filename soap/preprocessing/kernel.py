"""The inner loops, compiled: lines to numbers, and values to indices in order of first appearance. Nothing here knows a SPEC or a file.

They take half of the processor time of pyarrow's reader with its dictionaries, and a third to a quarter of polars'
(``benchmarks/preprocess_engines.py``), since numbers are made while bytes are read: no text of a category is ever stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

NUMBER, HEX, STRING = 0, 1, 2
"""Kinds of fields."""
GOOD, WRONG_COUNT, NO_NUMBER, NO_HEX = 0, 1, 2, 3
"""What is wrong with a line."""
TAB, NEWLINE, RETURN, MINUS = 9, 10, 13, 45
NUMBER_LIMIT = 2**31
HEX_DIGITS = 16

DIGITS: np.ndarray[Any, Any] = np.full(256, 255, np.uint8)
"""Byte -> value of a hexadecimal digit, or 255."""
for _i, _digit in enumerate(b"0123456789abcdef"):
    DIGITS[_digit] = DIGITS[ord(chr(_digit).upper())] = _i


@njit(cache=True, nogil=True)
def read_number(data, p, size, digits):  # type: ignore[no-untyped-def]
    """The whole number of a field: where the field ends, the number, and whether it is one in range."""
    negative = p < size and data[p] == MINUS
    if negative:
        p += 1
    begin = p
    value = np.int64(0)
    clean = True
    while p < size and data[p] != TAB and data[p] != NEWLINE and data[p] != RETURN:
        digit = digits[data[p]]
        if digit > 9:
            clean = False
        elif value < NUMBER_LIMIT:
            value = value * 10 + np.int64(digit)
        p += 1
    return p, -value if negative else value, clean and p > begin and value < NUMBER_LIMIT


@njit(cache=True, nogil=True)
def read_hex(data, p, size, digits):  # type: ignore[no-untyped-def]
    """The same for hexadecimal digits."""
    begin = p
    number = np.uint64(0)
    clean = True
    while p < size and data[p] != TAB and data[p] != NEWLINE and data[p] != RETURN:
        digit = digits[data[p]]
        if digit > 15:
            clean = False
        number = (number << np.uint64(4)) | np.uint64(digit)
        p += 1
    return p, number, clean and p - begin <= HEX_DIGITS


@njit(cache=True, nogil=True)
def parse(data, size, kinds, missing, moduli, spare, digits, numbers, ids, starts, ends, bad):  # type: ignore[no-untyped-def]
    """Read lines of fields between tabs. A line ends with LF, CR or CRLF, or where the data do.

    ``data``: bytes, of which the first ``size`` are read. Per column: ``kinds``, ``missing`` (for empty fields, as uint64 bits), ``moduli``
    (0: none), ``spare`` ((start, end) in ``data`` of the text for empty fields). Filled, one row per good line: ``numbers`` (columns, rows)
    int32, ``ids`` (columns, rows) uint64, ``starts`` and ``ends`` (columns, rows) int64, each with a row for each column of its kind.
    ``bad`` (lines, 5) int64: line number from 0, where it starts, what is wrong, fields, wrong column. Returns rows, bad lines, lines.
    """
    columns = len(kinds)
    p = row = wrong = line = 0
    while p < size:
        begin = p
        fault = GOOD
        place = -1
        n = h = s = fields = 0
        open_line = True
        while open_line:
            kind = kinds[fields] if fields < columns else STRING
            first = p
            if kind == NUMBER:
                p, value, clean = read_number(data, p, size, digits)
                if p == first:
                    value = np.int64(missing[fields])
                elif not clean:
                    if fault == GOOD:
                        fault, place = NO_NUMBER, fields
                    value = np.int64(0)
                numbers[n, row] = value
                n += 1
            elif kind == HEX:
                p, number, clean = read_hex(data, p, size, digits)
                if p == first:
                    number = missing[fields]
                elif not clean and fault == GOOD:
                    fault, place = NO_HEX, fields
                if moduli[fields] != 0:
                    number = number % moduli[fields]
                ids[h, row] = number
                h += 1
            else:
                while p < size and data[p] != TAB and data[p] != NEWLINE and data[p] != RETURN:
                    p += 1
                if fields < columns:
                    starts[s, row] = first if p > first else spare[fields, 0]
                    ends[s, row] = p if p > first else spare[fields, 1]
                    s += 1
            fields += 1
            if p < size and data[p] == TAB:
                p += 1
            else:
                open_line = False
        if p < size:
            p += 2 if data[p] == RETURN and p + 1 < size and data[p + 1] == NEWLINE else 1
        if fields != columns:
            fault = WRONG_COUNT
        if fault == GOOD:
            row += 1
        else:
            if wrong < len(bad):
                bad[wrong, 0] = line
                bad[wrong, 1] = begin
                bad[wrong, 2] = fault
                bad[wrong, 3] = fields
                bad[wrong, 4] = place
            wrong += 1
        line += 1
    return row, wrong, line


@njit(cache=True, nogil=True)
def count_lines(data):  # type: ignore[no-untyped-def]
    """At least as many as there are lines: bytes that may end one."""
    found = 1
    for byte in data:
        if byte in (NEWLINE, RETURN):
            found += 1
    return found


@njit(cache=True, nogil=True)
def add_ids(values, weights, begin, known, table, seen, counts, codes):  # type: ignore[no-untyped-def]
    """Index values (columns, rows), row by row, from position ``begin`` of rows × columns on. ``table``: 2^k places, -1 where free;
    ``seen`` and ``counts``: values and how often they came, ``known`` of them. Returns the position at which the table is half full, or
    the end, and how many are known."""
    columns, rows = values.shape
    mask = np.uint64(len(table) - 1)
    shift = np.uint64(64 - _bits(len(table)))
    limit = min(len(table) // 2, len(seen))
    row = begin // columns
    column = begin % columns
    while row < rows:
        while column < columns:
            value = values[column, row]
            place = (value * np.uint64(0x9E3779B97F4A7C15)) >> shift
            code = table[place]
            while code >= 0 and seen[code] != value:
                place = (place + np.uint64(1)) & mask
                code = table[place]
            if code < 0:
                if known >= limit:
                    return row * columns + column, known
                code = known
                table[place] = code
                seen[code] = value
                counts[code] = 0
                known += 1
            counts[code] += weights[row] if len(weights) else 1
            codes[column, row] = code
            column += 1
        column = 0
        row += 1
    return rows * columns, known


@njit(cache=True, nogil=True)
def place_ids(seen, known, table):  # type: ignore[no-untyped-def]
    """Put known values into an empty table."""
    mask = np.uint64(len(table) - 1)
    shift = np.uint64(64 - _bits(len(table)))
    for code in range(known):
        place = (seen[code] * np.uint64(0x9E3779B97F4A7C15)) >> shift
        while table[place] >= 0:
            place = (place + np.uint64(1)) & mask
        table[place] = code


@njit(cache=True, nogil=True)
def add_texts(data, spans, weights, begin, known, table, hashes, text, bounds, used, counts, codes):  # type: ignore[no-untyped-def]
    """As ``add_ids`` for bytes: value (column, row) is ``data[start:end]``, ``spans`` both. What is known: ``text`` (``used`` bytes), with
    ``bounds`` around each, and its ``hashes``. Stops, too, where ``text`` is full. Returns position, known and used."""
    starts, ends = spans
    columns, rows = starts.shape
    mask = np.uint64(len(table) - 1)
    limit = min(len(table) // 2, len(hashes))
    row = begin // columns
    column = begin % columns
    while row < rows:
        while column < columns:
            first, last = starts[column, row], ends[column, row]
            found = np.uint64(0xCBF29CE484222325)
            for i in range(first, last):
                found = (found ^ np.uint64(data[i])) * np.uint64(0x100000001B3)
            found ^= found >> np.uint64(29)
            place = found & mask
            code = table[place]
            while code >= 0 and not _same(data, first, last, text, bounds, hashes, code, found):
                place = (place + np.uint64(1)) & mask
                code = table[place]
            if code < 0:
                if known >= limit or used + last - first > len(text):
                    return row * columns + column, known, used
                code = known
                table[place] = code
                hashes[code] = found
                for i in range(first, last):
                    text[used + i - first] = data[i]
                used += last - first
                bounds[code + 1] = used
                counts[code] = 0
                known += 1
            counts[code] += weights[row] if len(weights) else 1
            codes[column, row] = code
            column += 1
        column = 0
        row += 1
    return rows * columns, known, used


@njit(cache=True, nogil=True)
def place_texts(hashes, known, table):  # type: ignore[no-untyped-def]
    """Put known texts into an empty table."""
    mask = np.uint64(len(table) - 1)
    for code in range(known):
        place = hashes[code] & mask
        while table[place] >= 0:
            place = (place + np.uint64(1)) & mask
        table[place] = code


@njit(cache=True, nogil=True)
def convert(codes, rows, offset, mapping, out, column):  # type: ignore[no-untyped-def]
    """``out[:, column] = mapping[codes]`` for so many rows from ``offset`` on."""
    for row in range(rows):
        out[row, column] = mapping[codes[offset + row]]


@njit(cache=True, nogil=True)
def _same(data, first, last, text, bounds, hashes, code, found):  # type: ignore[no-untyped-def]
    if hashes[code] != found or bounds[code + 1] - bounds[code] != last - first:
        return False
    begin = bounds[code]
    for i in range(last - first):  # noqa: SIM110 - numba has no generator expressions
        if text[begin + i] != data[first + i]:
            return False
    return True


@njit(cache=True, nogil=True)
def _bits(size):  # type: ignore[no-untyped-def]
    """k of 2^k."""
    bits = 0
    while size > 1:
        size >>= 1
        bits += 1
    return bits


@njit(cache=True, nogil=True)
def checksum(words, tail):  # type: ignore[no-untyped-def]
    """64 bits of words (uint64) and of the bytes behind them, which tell changed data from what they were; no defence against forgery."""
    a, b = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
    c, d = np.uint64(0x165667B19E3779F9), np.uint64(0x27D4EB2F165667C5)
    m = np.uint64(0xFF51AFD7ED558CCD)
    whole = len(words) // 4 * 4
    for i in range(0, whole, 4):  # four sums, so that multiplications overlap
        a = (a ^ words[i]) * m
        a ^= a >> np.uint64(32)
        b = (b ^ words[i + 1]) * m
        b ^= b >> np.uint64(32)
        c = (c ^ words[i + 2]) * m
        c ^= c >> np.uint64(32)
        d = (d ^ words[i + 3]) * m
        d ^= d >> np.uint64(32)
    for i in range(whole, len(words)):
        a = (a ^ words[i]) * m
        a ^= a >> np.uint64(32)
    for byte in tail:
        b = (b ^ np.uint64(byte)) * m
        b ^= b >> np.uint64(32)
    found = np.uint64(8 * len(words) + len(tail))
    for lane in (a, b, c, d):
        found = (found ^ lane) * m
        found ^= found >> np.uint64(33)
    return found
