"""Lua that runs in Redis, where several steps must be one. All keys of a script lie in one slot.

The hash of tombstones also says about itself: `=version`, a word that every change of them replaces, so that
nobody reads all of them to see that they are as they were; and `=retention`, the longest time in seconds for
which a pod keeps text, with `=told` (ms), when one said so last. No tenant is called so. They are in the hash
and not in a key of their own, so that what is lost is lost together. Redis 6.2 has no EXPIRE GT: thus `live`.
"""

from __future__ import annotations

_NOW = """
local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
"""

_LIVES = """
-- For how long tombstones are kept, in seconds: as long as any pod keeps text.
local function kept(tombstones, seconds)
  local told = tonumber(redis.call('HGET', tombstones, '=retention') or '0') or 0
  return math.max(tonumber(seconds), math.min(told, 2^31))
end
-- Gives a key so long to live; never less than it has.
local function live(key, seconds)
  if redis.call('PTTL', key) < 1000 * seconds then redis.call('EXPIRE', key, seconds) end
end
"""

PUBLISH = (
    _NOW
    + _LIVES
    + """
-- KEYS: tombstones, log, tenants, epoch. ARGV: tenant, generation, entries, seconds, records...
-- Returns how many were written, and the tombstone that forbade it or 0.
local tombstone = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0') or 0
if tombstone > tonumber(ARGV[2]) then return {0, string.format('%.0f', tombstone)} end
for i = 5, #ARGV do redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'r', ARGV[i]) end
redis.call('ZADD', KEYS[3], string.format('%.0f', now()), ARGV[1])
local seconds = tonumber(ARGV[4])
live(KEYS[2], seconds)
live(KEYS[3], seconds)
live(KEYS[4], math.max(3600, seconds))
return {#ARGV - 4, '0'}
"""
)
"""Writes records of a tenant, unless it was purged since their generation."""

REFILL = (
    _NOW
    + _LIVES
    + """
-- KEYS: tombstones, log, tenants, refilled. ARGV: tenant, entries, seconds, (digest, generation, record)...
local tombstone = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0') or 0
local written = 0
for i = 4, #ARGV, 3 do
  if tonumber(ARGV[i + 1]) >= tombstone and redis.call('SADD', KEYS[4], ARGV[i]) == 1 then
    redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'r', ARGV[i + 2])
    written = written + 1
  end
end
if written > 0 then
  redis.call('ZADD', KEYS[3], string.format('%.0f', now()), ARGV[1])
  live(KEYS[2], tonumber(ARGV[3]))
  live(KEYS[3], tonumber(ARGV[3]))
  redis.call('EXPIRE', KEYS[4], 3600)
end
return written
"""
)
"""Writes records again that are not dead, each once whoever else does the same within an hour; how many."""

LOOK = (
    _NOW
    + """
-- KEYS: tombstones, epoch, logs... Returns now, epoch, the tombstones' version or nothing; length, first and
-- last id of each log.
local logs = {}
for i = 3, #KEYS do
  local first = redis.pcall('XRANGE', KEYS[i], '-', '+', 'COUNT', 1)
  if first.err then logs[#logs + 1] = {'0', '0-0', '0-0'}
  elseif #first == 0 then logs[#logs + 1] = {'0', '0-0', '0-0'}
  else
    local last = redis.call('XREVRANGE', KEYS[i], '+', '-', 'COUNT', 1)
    logs[#logs + 1] = {tostring(redis.call('XLEN', KEYS[i])), first[1][1], last[1][1]}
  end
end
local version = redis.call('HGET', KEYS[1], '=version') or ''
return {string.format('%.0f', now()), redis.call('GET', KEYS[2]) or '', version, logs}
"""
)
"""What must be known before anything is shared. Reads only, so that a replica answers it too."""

BURY = (
    _LIVES
    + """
-- KEYS: tombstones, tenants, logs... ARGV: seconds, version, (tenant, tombstone)... for each log.
local raised = 0
for i = 3, #KEYS do
  local tenant, tombstone = ARGV[2 * i - 3], ARGV[2 * i - 2]
  if tonumber(tombstone) > (tonumber(redis.call('HGET', KEYS[1], tenant) or '0') or 0) then
    redis.call('UNLINK', KEYS[i])
    redis.call('ZREM', KEYS[2], tenant)
    redis.call('HSET', KEYS[1], tenant, tombstone, '=version', ARGV[2])
    raised = raised + 1
  end
end
if raised > 0 then live(KEYS[1], kept(KEYS[1], ARGV[1])) end
return raised
"""
)
"""Puts tombstones back that a Redis has lost, and removes what it holds of their tenants; how many."""

PURGE = (
    _NOW
    + _LIVES
    + """
-- KEYS: tombstones, log, tenants. ARGV: tenant, seconds, version.
-- Returns the tombstone, the entries that went, and for how many seconds it is kept.
local known = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0') or 0
local id = string.format('%.0f', math.max(now(), known + 1))
local seconds = kept(KEYS[1], ARGV[2])
local length = redis.pcall('XLEN', KEYS[2])
-- First what needs no room: a Redis that is full lets a script go on that has begun to write.
redis.call('UNLINK', KEYS[2])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], id, '=version', ARGV[3])
live(KEYS[1], seconds)
return {id, tostring(type(length) == 'number' and length or 0), string.format('%.0f', seconds)}
"""
)
"""Deletes a tenant's text, and says so to everybody who holds a copy."""

KEEP = (
    _NOW
    + _LIVES
    + """
-- KEYS: tombstones, epoch. ARGV: seconds. Returns for how many seconds tombstones are kept.
local told = tonumber(redis.call('HGET', KEYS[1], '=told') or '0') or 0
local longest = kept(KEYS[1], 0)
-- One that keeps text for longer may be cut off for a while: what it said holds for as long.
if tonumber(ARGV[1]) >= longest or now() - told > 1000 * longest then
  redis.call('HSET', KEYS[1], '=retention', ARGV[1], '=told', string.format('%.0f', now()))
end
local seconds = kept(KEYS[1], ARGV[1])
live(KEYS[1], seconds)
live(KEYS[2], math.max(3600, seconds))
return string.format('%.0f', seconds)
"""
)
"""Says how long a pod keeps text, and lengthens what must live as long."""

FORGET = """
-- KEYS: tombstones. ARGV: version, (tenant, tombstone)... Returns how many went.
local gone = 0
for i = 2, #ARGV, 2 do
  if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[i + 1] then
    gone = gone + redis.call('HDEL', KEYS[1], ARGV[i])
  end
end
if gone > 0 then redis.call('HSET', KEYS[1], '=version', ARGV[1]) end
return gone
"""
"""Removes tombstones that are too old, unless they are others by now."""

TRIM = (
    _NOW
    + """
-- KEYS: tenants, logs... ARGV: seconds. Returns how many entries went.
local oldest = now() - tonumber(ARGV[1]) * 1000
local gone = 0
for i = 2, #KEYS do
  local removed = redis.pcall('XTRIM', KEYS[i], 'MINID', string.format('%.0f', oldest))
  if type(removed) == 'number' then gone = gone + removed
  elseif not string.find(removed.err, 'WRONGTYPE') then return removed end
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('(%.0f', oldest))
return gone
"""
)
"""Removes text that is older than it may be."""
