"""Lua that runs in Redis, where several steps must be one. All keys of a script lie in one slot."""

from __future__ import annotations

_NOW = """
local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
"""

PUBLISH = (
    _NOW
    + """
-- KEYS: tombstones, log, tenants, epoch. ARGV: tenant, generation, entries, seconds, records...
-- Returns how many were written, and the tombstone that forbade it or 0.
local tombstone = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0') or 0
if tombstone > tonumber(ARGV[2]) then return {0, string.format('%.0f', tombstone)} end
for i = 5, #ARGV do redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'r', ARGV[i]) end
redis.call('EXPIRE', KEYS[2], ARGV[4])
redis.call('ZADD', KEYS[3], string.format('%.0f', now()), ARGV[1])
redis.call('EXPIRE', KEYS[3], ARGV[4])
redis.call('EXPIRE', KEYS[4], math.max(3600, tonumber(ARGV[4])))
return {#ARGV - 4, '0'}
"""
)
"""Writes records of a tenant, unless it was purged since their generation."""

REFILL = (
    _NOW
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
  redis.call('EXPIRE', KEYS[2], ARGV[3])
  redis.call('ZADD', KEYS[3], string.format('%.0f', now()), ARGV[1])
  redis.call('EXPIRE', KEYS[3], ARGV[3])
  redis.call('EXPIRE', KEYS[4], 3600)
end
return written
"""
)
"""Writes records again that are not dead, each once whoever else does the same within an hour; how many."""

LOOK = (
    _NOW
    + """
-- KEYS: tombstones, epoch, logs... Returns now, epoch, tombstones; length, first and last id of each log.
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
return {string.format('%.0f', now()), redis.call('GET', KEYS[2]) or '', redis.call('HGETALL', KEYS[1]), logs}
"""
)
"""What must be known before anything is shared. Reads only, so that a replica answers it too."""

BURY = """
-- KEYS: tombstones, tenants, logs... ARGV: seconds, (tenant, tombstone)... as many as there are logs.
local raised = 0
for i = 3, #KEYS do
  local tenant, tombstone = ARGV[2 * i - 4], ARGV[2 * i - 3]
  if tonumber(tombstone) > (tonumber(redis.call('HGET', KEYS[1], tenant) or '0') or 0) then
    redis.call('UNLINK', KEYS[i])
    redis.call('ZREM', KEYS[2], tenant)
    redis.call('HSET', KEYS[1], tenant, tombstone)
    raised = raised + 1
  end
end
if raised > 0 then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
return raised
"""
"""Puts tombstones back that a Redis has lost, and removes what it holds of their tenants; how many."""

PURGE = (
    _NOW
    + """
-- KEYS: tombstones, log, tenants. ARGV: tenant, seconds. Returns the tombstone and the entries that went.
local known = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0') or 0
local id = string.format('%.0f', math.max(now(), known + 1))
local length = redis.pcall('XLEN', KEYS[2])
-- First what needs no room: a Redis that is full lets a script go on that has begun to write.
redis.call('UNLINK', KEYS[2])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], id)
redis.call('EXPIRE', KEYS[1], ARGV[2])
return {id, tostring(type(length) == 'number' and length or 0)}
"""
)
"""Deletes a tenant's text, and says so to everybody who holds a copy."""

TRIM = (
    _NOW
    + """
-- KEYS: tombstones, tenants, epoch, logs... ARGV: seconds. Returns how many entries and tombstones went.
local oldest = now() - tonumber(ARGV[1]) * 1000
local gone = 0
for i = 4, #KEYS do
  local removed = redis.pcall('XTRIM', KEYS[i], 'MINID', string.format('%.0f', oldest))
  if type(removed) == 'number' then gone = gone + removed
  elseif not string.find(removed.err, 'WRONGTYPE') then return removed end
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('(%.0f', oldest))
local tombstones = redis.call('HGETALL', KEYS[1])
for i = 1, #tombstones, 2 do
  if (tonumber(tombstones[i + 1]) or 0) < oldest then
    gone = gone + redis.call('HDEL', KEYS[1], tombstones[i])
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[3], math.max(3600, tonumber(ARGV[1])))
return gone
"""
)
"""Removes what is older than it may be."""
