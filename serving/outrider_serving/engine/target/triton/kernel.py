"""The kernels: new keys and values go to their slots, blocks of tokens attend, chunks of texts are merged.

Softmax is summed up as the keys go by (Milakov, Gimelshein 2018, arXiv 1805.02867): of the scores seen so far
there is the highest, `top`, the sum `total` of exp(score - top), and `acc`, the values weighted alike. Scores
are in units of ln 2, so that exp becomes exp2. Every chunk of a text begins anew, and chunks are folded into
each other from the first to the last, by one program in `attend` or from memory in `merge`: `_fold` is the
only place where this happens, with its roundings spelled out, so that both give the same bits.

What a token does not see adds exactly nothing: whole tiles and chunks of it leave every bit as it was. So a
program may begin and end where its whole block needs it.

Programs walk through lists whose lengths are read from memory; grids depend on maxima only. One whose number
is beyond the list returns at once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from outrider_serving.engine.target.triton.tables import FIELDS, WHOLE

_FIELDS = tl.constexpr(len(FIELDS))
_FIRST = tl.constexpr(FIELDS.index("first"))
_COUNT = tl.constexpr(FIELDS.index("count"))
_PAGES = tl.constexpr(FIELDS.index("pages"))
_PLACE = tl.constexpr(FIELDS.index("place"))
_TRUNK = tl.constexpr(FIELDS.index("trunk"))
_BITS = tl.constexpr(FIELDS.index("bits"))
_PARTIAL = tl.constexpr(FIELDS.index("partial"))
_WHOLE = tl.constexpr(WHOLE)
_NOTHING = tl.constexpr(float("-inf"))
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def write(
    keys,  # [slots, heads, key size], contiguous
    values,  # [slots, heads, value size], contiguous
    key,  # [heads, T, key size], the last dimension contiguous
    value,  # [heads, T, value size], likewise
    slots,  # [T], negative for padding
    key_head_stride,
    key_token_stride,
    value_head_stride,
    value_token_stride,
    heads: tl.constexpr,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    key_width: tl.constexpr,  # heads * key size, rounded up to a power of two
    value_width: tl.constexpr,
):
    """Put the keys and values of new tokens to their slots, one token a program."""
    token = tl.program_id(0)
    slot = tl.load(slots + token).to(tl.int64)
    at = tl.arange(0, key_width)
    there = at < tl.where(slot < 0, 0, heads * key_size)
    source = key + at // key_size * key_head_stride + token * key_token_stride + at % key_size
    tl.store(keys + slot * (heads * key_size) + at, tl.load(source, mask=there, other=0.0), mask=there)
    at = tl.arange(0, value_width)
    there = at < tl.where(slot < 0, 0, heads * value_size)
    source = value + at // value_size * value_head_stride + token * value_token_stride + at % value_size
    tl.store(values + slot * (heads * value_size) + at, tl.load(source, mask=there, other=0.0), mask=there)


@triton.jit
def attend(
    out,  # [T, query heads, value size], contiguous
    part_top,  # [partials, tile, query heads]
    part_total,  # [partials, tile, query heads]
    part_acc,  # [partials, tile, query heads, value size]
    query,  # [query heads, T, key size], the last dimension contiguous
    keys,  # [slots, heads, key size], contiguous
    values,  # [slots, heads, value size], contiguous
    counts,
    items,
    blocks,
    positions,
    pool,
    query_head_stride,
    query_token_stride,
    scale: tl.constexpr,
    window: tl.constexpr,  # None for all positions
    softcap: tl.constexpr,  # None for none
    heads: tl.constexpr,
    group: tl.constexpr,  # query heads of a head
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    page_size: tl.constexpr,
    words: tl.constexpr,
    tile: tl.constexpr,
    chunk_size: tl.constexpr,
    rows: tl.constexpr,  # tile * group, rounded up to a power of two
    places: tl.constexpr,  # how many keys are worked on at once; divides the chunk size
    key_width: tl.constexpr,  # key size, rounded up to a power of two
    value_width: tl.constexpr,
    precision: tl.constexpr,
):
    """Attention of each block of new tokens, over its whole text or one chunk of it."""
    head = tl.program_id(1)
    row = tl.arange(0, rows)
    token = row // group
    query_head = head * group + row % group
    of_key = tl.arange(0, key_width)
    of_value = tl.arange(0, value_width)
    sums = part_acc.dtype.element_ty
    for item in tl.range(tl.program_id(0), tl.load(counts), tl.num_programs(0)):
        block = blocks + tl.load(items + 2 * item) * _FIELDS
        chunk = tl.load(items + 2 * item + 1)
        first = tl.load(block + _FIRST)
        count = tl.load(block + _COUNT)
        pages = pool + tl.load(block + _PAGES)
        place = tl.load(block + _PLACE)
        trunk = tl.load(block + _TRUNK)
        masks = pool + tl.load(block + _BITS)
        partial = (tl.load(block + _PARTIAL) + chunk).to(tl.int64)
        end = place + count

        live = row < count * group
        position = tl.load(positions + first + token, mask=live, other=0)
        begin = 0
        if window is not None:
            begin = tl.maximum(tl.min(tl.where(live, position, end)) - window + 1, 0)
        q = tl.load(
            query
            + query_head[:, None] * query_head_stride
            + (first + token)[:, None] * query_token_stride
            + of_key[None, :],
            mask=live[:, None] & (of_key < key_size)[None, :],
            other=0.0,
        )

        whole = chunk == _WHOLE
        chunk_from = tl.where(whole, begin // chunk_size, chunk)
        chunk_to = tl.where(whole, (end + chunk_size - 1) // chunk_size, chunk + 1)
        top = tl.full([rows], _NOTHING, sums)
        total = tl.full([rows], 0.0, sums)
        acc = tl.full([rows, value_width], 0.0, sums)
        for at in tl.range(chunk_from, chunk_to):
            chunk_top = tl.full([rows], _NOTHING, sums)
            chunk_total = tl.full([rows], 0.0, sums)
            chunk_acc = tl.full([rows, value_width], 0.0, sums)
            tile_from = tl.maximum(at * chunk_size, begin // places * places)
            tile_to = tl.minimum(at * chunk_size + chunk_size, end)
            bend = tl.maximum(tl.minimum(trunk // places * places, tile_to), tile_from)
            for branched in tl.static_range(2):
                chunk_top, chunk_total, chunk_acc = _walk(
                    chunk_top,
                    chunk_total,
                    chunk_acc,
                    bend if branched else tile_from,
                    tile_to if branched else bend,
                    q,
                    keys,
                    values,
                    pages,
                    masks,
                    positions + first - place,
                    place + token,
                    position,
                    live,
                    begin,
                    end,
                    trunk,
                    token,
                    head,
                    branched,
                    scale,
                    window,
                    softcap,
                    heads,
                    key_size,
                    value_size,
                    page_size,
                    words,
                    places,
                    key_width,
                    value_width,
                    precision,
                )
            top, total, acc = _fold(top, total, acc, chunk_top, chunk_total, chunk_acc)

        result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        wide = (of_value < value_size)[None, :]
        to = ((first + token) * (heads * group) + query_head)[:, None] * value_size + of_value[None, :]
        tl.store(
            out + to,
            result.to(out.dtype.element_ty),
            mask=(row < tl.where(whole, count * group, 0))[:, None] & wide,
        )
        to = (partial * tile + token) * (heads * group) + query_head
        apart = row < tl.where(whole, 0, count * group)
        tl.store(part_top + to, top, mask=apart)
        tl.store(part_total + to, total, mask=apart)
        tl.store(part_acc + to[:, None] * value_size + of_value[None, :], acc, mask=apart[:, None] & wide)


@triton.jit
def merge(
    out,
    part_top,
    part_total,
    part_acc,
    counts,
    merges,
    blocks,
    positions,
    window: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    value_size: tl.constexpr,
    tile: tl.constexpr,
    chunk_size: tl.constexpr,
    rows: tl.constexpr,  # group, rounded up to a power of two
    value_width: tl.constexpr,
):
    """The results of split blocks, a token and a group of heads at a time; see `attend` for the arguments."""
    head = tl.program_id(1)
    row = tl.arange(0, rows)
    of_value = tl.arange(0, value_width)
    wide = (of_value < value_size)[None, :]
    sums = part_acc.dtype.element_ty
    for work in tl.range(tl.program_id(0), tl.load(counts + 1) * tile, tl.num_programs(0)):
        block = blocks + tl.load(merges + work // tile) * _FIELDS
        token = work % tile
        first = tl.load(block + _FIRST)
        padding = token >= tl.load(block + _COUNT)
        live = row < tl.where(padding, 0, group)
        place = tl.load(block + _PLACE) + token
        partial = tl.load(block + _PARTIAL).to(tl.int64)
        chunk_from = 0
        if window is not None:
            position = tl.load(positions + first + token, mask=padding == 0, other=0)
            chunk_from = tl.maximum(position - window + 1, 0) // chunk_size
        chunk_to = tl.where(padding, 0, place // chunk_size + 1)
        top = tl.full([rows], _NOTHING, sums)
        total = tl.full([rows], 0.0, sums)
        acc = tl.full([rows, value_width], 0.0, sums)
        for chunk in tl.range(chunk_from, chunk_to, num_stages=4):
            of = ((partial + chunk) * tile + token) * (heads * group) + head * group + row
            chunk_top = tl.load(part_top + of, mask=live, other=_NOTHING)
            chunk_total = tl.load(part_total + of, mask=live, other=0.0)
            chunk_acc = tl.load(
                part_acc + of[:, None] * value_size + of_value[None, :], mask=live[:, None] & wide, other=0.0
            )
            top, total, acc = _fold(top, total, acc, chunk_top, chunk_total, chunk_acc)
        result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        to = (first + token) * (heads * group) + head * group + row
        to = to[:, None] * value_size + of_value[None, :]
        tl.store(out + to, result.to(out.dtype.element_ty), mask=live[:, None] & wide)


@triton.jit
def _walk(
    top,
    total,
    acc,
    start,
    stop,
    q,
    keys,
    values,
    pages,
    masks,
    positions,  # from which a place's position is as far away as the place
    own,  # [rows], the tokens' own places
    position,
    live,
    begin,
    end,
    trunk,
    token,
    head,
    branched: tl.constexpr,  # False where all places are before the trunk's end
    scale: tl.constexpr,
    window: tl.constexpr,
    softcap: tl.constexpr,
    heads: tl.constexpr,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    page_size: tl.constexpr,
    words: tl.constexpr,
    places: tl.constexpr,
    key_width: tl.constexpr,
    value_width: tl.constexpr,
    precision: tl.constexpr,
):
    """Softmax carried on over the places from `start` to before `stop`, some at a time.

    What is before `begin` or not before `end` is not read: no token of the block sees it.
    """
    of_key = tl.arange(0, key_width)
    of_value = tl.arange(0, value_width)
    for at in tl.range(start, stop, places):
        near = at + tl.arange(0, places)
        there = (near >= begin) & (near < end)
        page = tl.load(pages + near // page_size, mask=there, other=0)
        slot = page.to(tl.int64) * page_size + near % page_size
        seen = there[None, :] & (near[None, :] <= own[:, None])
        key_position = near
        if branched:
            beyond = there & (near >= trunk)
            node = tl.maximum(near - trunk, 0)
            mask = tl.load(
                masks + token[:, None] * words + (node >> 5)[None, :],
                mask=(live & (own >= trunk))[:, None] & beyond[None, :],
                other=0,
            )
            follows = (mask >> (node & 31)[None, :]) & 1
            seen = seen & ((near < trunk)[None, :] | (follows == 1))
            key_position = tl.load(positions + near, mask=beyond, other=0)
            key_position = tl.where(beyond, key_position, near)
        if window is not None:
            seen = seen & (key_position[None, :] > position[:, None] - window)

        key = tl.load(
            keys + (slot * heads + head)[:, None] * key_size + of_key[None, :],
            mask=there[:, None] & (of_key < key_size)[None, :],
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(key), input_precision=precision)
        if softcap is not None:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            grown = tl.exp2(scores * (2.0 * _LOG2E * scale / softcap))
            scores = (softcap * _LOG2E) * (1.0 - 2.0 / (grown + 1.0))
        else:
            scores = scores * (scale * _LOG2E)
        scores = tl.where(seen, scores, _NOTHING)
        higher = tl.maximum(top, tl.max(scores, 1))
        origin = _origin(higher)
        weights = tl.exp2(scores - origin[:, None])
        shrink = tl.exp2(top - origin)
        value = tl.load(
            values + (slot * heads + head)[:, None] * value_size + of_value[None, :],
            mask=there[:, None] & (of_value < value_size)[None, :],
            other=0.0,
        )
        acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision=precision)
        total = total * shrink + tl.sum(weights, 1)
        top = higher
    return top, total, acc


@triton.jit
def _origin(top):
    """What to measure scores from: a row that has seen nothing must not take -inf from -inf."""
    return tl.where(top == _NOTHING, 0.0, top)


@triton.jit
def _fold(top, total, acc, chunk_top, chunk_total, chunk_acc):
    """What two parts give together, of which the second one comes later in the text."""
    higher = tl.maximum(top, chunk_top)
    origin = _origin(higher)
    shrink = tl.exp2(top - origin)
    chunk_shrink = tl.exp2(chunk_top - origin)
    total = tl.fma(total, shrink, chunk_total * chunk_shrink)
    acc = tl.fma(acc, tl.broadcast_to(shrink[:, None], acc.shape), chunk_acc * chunk_shrink[:, None])
    return higher, total, acc
