"""Reads what a stream already holds: from where what can be kept begins, a little at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider_serving.suffix.lookup import LESSON_TOKENS
from outrider_serving.suffix.shared import replies
from outrider_serving.suffix.shared.cursor import Cursor, Read, format_id
from outrider_serving.suffix.shared.line import Line
from outrider_serving.suffix.shared.options import MAX_BYTES
from outrider_serving.suffix.shared.record import Record
from outrider_serving.suffix.shared.replies import Entry

_LOOKED_BYTES, _LOOKED_ENTRIES = 1 << 20, 2048
"""How much one look for the beginning goes through, which takes Redis some milliseconds."""

_TOKENS_AT = 40
"""Where the bytes of a record say how many tokens it has; see `record.py`."""

_BACK = """
-- KEYS: log. ARGV: newest and oldest id, tokens, bytes, entries, where a record has its tokens.
-- Goes back from the newest entry until there are as many tokens, or as much was gone through as a call may.
-- Returns how many entries the log has; the id come to, entries and tokens from there on; 1 if that is all.
local id, entries, tokens, bytes, all = '', 0, 0, 0, 0
local newest, at = ARGV[1], tonumber(ARGV[6])
repeat
  local found = redis.call('XREVRANGE', KEYS[1], newest, ARGV[2], 'COUNT', 16)
  for i = 1, #found do
    local record = found[i][2][1] == 'r' and found[i][2][2] or ''
    id, entries, bytes = found[i][1], entries + 1, bytes + #record
    if #record > at + 3 then tokens = tokens + struct.unpack('<I4', record, at + 1) end
    if tokens >= tonumber(ARGV[3]) then all = 1; break end
  end
  if #found < 16 then all = 1 end
  newest = '(' .. id
until all == 1 or bytes >= tonumber(ARGV[4]) or entries >= tonumber(ARGV[5])
return {redis.call('XLEN', KEYS[1]), id, entries, tokens, all}
"""

_NEXT = """
-- KEYS: log. ARGV: id, entries, bytes. Returns entries after the id, as XRANGE does.
-- What is too long for a record is cut, so that nobody else's entry makes the answer too large to be read.
local found = redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], '+', 'COUNT', ARGV[2])
for i = 1, #found do
  local fields = found[i][2]
  if #fields ~= 2 or fields[1] ~= 'r' then found[i][2] = {}
  elseif #fields[2] > tonumber(ARGV[3]) then fields[2] = string.sub(fields[2], 1, ARGV[3] + 1) end
end
return found
"""


async def begin(line: Line, cursor: Cursor, tokens: int) -> None:
    """Let a cursor begin at the newest records that have so many tokens together, or where it is.

    Raises:
        ResponseError: something else than a stream has its key; or another refusal.
    """
    log, lap = line.keys.log(cursor.tenant), cursor.lap
    newest, oldest = "+", f"({format_id(cursor.position)}"
    entries, length, first = 0, 0, 0
    ended = False
    while not ended and tokens > 0 and entries < cursor.bound:
        about = (newest, oldest, tokens, _LOOKED_BYTES, _LOOKED_ENTRIES, _TOKENS_AT)
        there, entry, more, found, last = replies.items(await line.eval(_BACK, [log], about), 5)
        length = length or replies.number(there)
        ended = bool(replies.number(last))
        if replies.number(more) < 1:
            break
        first = replies.entry_id(entry)
        newest = f"({format_id(first)}"
        entries += replies.number(more)
        tokens -= replies.number(found)
    if cursor.lap == lap:
        cursor.begin_after(first - 1 if first else 0, max(0, length - entries))


async def following(line: Line, cursor: Cursor, count: int) -> list[Entry]:
    """So many of the next entries of a stream; none is longer than a byte more than a record may be.

    Raises:
        ResponseError: something else than a stream has its key; or another refusal.
    """
    about = (format_id(cursor.position), count, MAX_BYTES)
    return replies.entries(await line.eval(_NEXT, [line.keys.log(cursor.tenant)], about))


def portions(read: Sequence[Read]) -> Iterator[Sequence[Read]]:
    """What is read, in parts that are delivered together: LESSON_TOKENS at most, or one entry."""
    begin = tokens = 0
    for at, entry in enumerate(read):
        more = entry.record.tokens if isinstance(entry.record, Record) else 0
        if at > begin and tokens + more > LESSON_TOKENS:
            yield read[begin:at]
            begin, tokens = at, 0
        tokens += more
    if read:
        yield read[begin:]
