"""The Lua scripts of the Redis store: each is one atomic step on the keys of one pool.

Redis runs a script alone, and rejects its first write if memory is full, so a script happens as a
whole or not at all. A script is `PRELUDE`, `OWN_TERM` if it writes, then what it does.
"""

PRELUDE = """
local meta, pools, pool, layouts, averages, decisions, commits, audit = unpack(KEYS)
local incarnation, term, name = ARGV[1], ARGV[2], ARGV[3]
local kept, highest_term, fenced_by =
  unpack(redis.call('HMGET', meta, 'incarnation', 'term', 'server'))
if kept ~= incarnation then return {'lost'} end
local function server()
  local info = redis.pcall('INFO', 'replication')
  return type(info) == 'string' and string.match(info, 'master_replid:(%w+)') or ''
end
local function keep(generation, layout, num_kept)
  redis.call('SADD', pools, name)
  redis.call('HSET', layouts, generation, layout)
  local highest = tonumber(redis.call('HGET', pool, 'highest') or '0')
  if tonumber(generation) > highest then redis.call('HSET', pool, 'highest', generation) end
  local committed = redis.call('HGET', pool, 'committed')
  local generations = redis.call('HKEYS', layouts)
  table.sort(generations, function(a, b) return tonumber(a) > tonumber(b) end)
  for place = num_kept + 1, #generations do
    if generations[place] ~= committed then redis.call('HDEL', layouts, generations[place]) end
  end
end
local function newest(stream)
  local entry = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  return tonumber(entry and string.match(entry[1], '^%d+') or '0')
end
local function note_commit(generation)
  redis.call('SADD', commits, generation)
  for _, known in ipairs(redis.call('SMEMBERS', commits)) do
    if redis.call('HEXISTS', layouts, known) == 0 then redis.call('SREM', commits, known) end
  end
end
"""
"""Precedes every script but OPEN. ARGV: incarnation, term ('' for a read), pool name.

Numbers are compared as float64, which is exact: terms are at most `MAX_TERM`, epochs and
generations at most 2^53.

Any script may return {'lost'} or {'over', highest term}.
"""

OWN_TERM = """
if term ~= highest_term or server() ~= fenced_by then return {'over', highest_term} end
"""
"""Rejects writes unless their term fenced the contents last, on this server.

FENCE stores the server's replication ID, which a failover changes. After one, a higher term may
have been lost, or even the fence of this one.
"""

OPEN = """
local meta, incarnation, schema = KEYS[1], ARGV[1], ARGV[2]
if redis.call('EXISTS', meta) == 0 then
  redis.call('HSET', meta, 'incarnation', incarnation, 'schema', schema, 'term', '0')
end
return redis.call('HMGET', meta, 'schema', 'incarnation')
"""
"""Create the store if missing; return its schema version and incarnation."""

HIGHEST_TERM = "return {'ok', highest_term}"

FENCE = """
if not tonumber(highest_term) or tonumber(term) <= tonumber(highest_term) then
  return {'over', highest_term}
end
redis.call('HSET', meta, 'term', term, 'server', server())
local found, schema = tonumber(redis.call('HGET', meta, 'schema')), ARGV[4]
if found and found < tonumber(schema) then redis.call('HSET', meta, 'schema', schema) end
return {'ok'}
"""
"""Also raises the schema version: a follower of a later release leaves it as it is, so that an
aborted upgrade does not lock out the balancers of the earlier one."""

POOLS = "return {'ok', redis.call('SMEMBERS', pools)}"

FORGET = """
redis.call('DEL', pool, layouts, averages, decisions, commits, audit)
redis.call('SREM', pools, name)
return {'ok'}
"""

PUT_PROPOSED = """
local generation, layout, num_kept = ARGV[4], ARGV[5], tonumber(ARGV[6])
if redis.call('HGET', layouts, generation) == layout then return {'ok'} end
local highest = redis.call('HGET', pool, 'highest') or '0'
if tonumber(generation) <= tonumber(highest) then return {'used', highest} end
keep(generation, layout, num_kept)
return {'ok'}
"""

COMMIT = """
local generation, previous = ARGV[4], ARGV[5]
local committed = redis.call('HGET', pool, 'committed') or ''
if committed == generation then return {'ok'} end
if committed ~= previous then return {'other', committed} end
if redis.call('HEXISTS', layouts, generation) == 0 then return {'unknown'} end
redis.call('HSET', pool, 'committed', generation)
note_commit(generation)
return {'ok'}
"""

ADOPT = """
local generation, layout, num_kept = ARGV[4], ARGV[5], tonumber(ARGV[6])
redis.call('HSET', pool, 'committed', generation)
keep(generation, layout, num_kept)
note_commit(generation)
return {'ok'}
"""

COMMITS = """
local kept = {}
for _, generation in ipairs(redis.call('SMEMBERS', commits)) do
  if redis.call('HEXISTS', layouts, generation) == 1 then table.insert(kept, generation) end
end
return {'ok', kept}
"""

RECALL = """
local function layout(generation)
  return generation and redis.call('HGET', layouts, generation)
end
local committed, highest, hold, epoch, workers, num_audit = unpack(
  redis.call('HMGET', pool, 'committed', 'highest', 'hold', 'epoch', 'workers', 'num_audit'))
local proposed, newest = false, tonumber(committed) or 0
for _, generation in ipairs(redis.call('HKEYS', layouts)) do
  if tonumber(generation) > newest then proposed, newest = generation, tonumber(generation) end
end
return {'ok', committed, layout(committed), proposed, layout(proposed), highest or '0', hold,
  epoch, workers, num_audit or '0', redis.call('HGETALL', averages),
  redis.call('XREVRANGE', decisions, '+', '-', 'COUNT', 1),
  redis.call('XREVRANGE', audit, '+', '-', 'COUNT', ARGV[4])}
"""

LAYOUT = "return {'ok', ARGV[4], redis.call('HGET', layouts, ARGV[4])}"

PUT_MEMBERSHIP = """
local epoch, workers = ARGV[4], ARGV[5]
local latest = redis.call('HGET', pool, 'epoch')
if latest and tonumber(latest) > tonumber(epoch) then return {'later', latest} end
redis.call('HSET', pool, 'epoch', epoch, 'workers', workers)
redis.call('SADD', pools, name)
return {'ok'}
"""

PUT_AVERAGE = """
redis.call('HSET', averages, ARGV[4], ARGV[5])
redis.call('SADD', pools, name)
return {'ok'}
"""

ADD_DECISION = """
local counted = tonumber(redis.call('HGET', pool, 'num_decisions') or '0')
local sequence = math.max(counted, newest(decisions)) + 1
redis.call('HSET', pool, 'num_decisions', sequence)
redis.call('XADD', decisions, 'MAXLEN', ARGV[5], sequence .. '-0', 'record', ARGV[4])
redis.call('SADD', pools, name)
return {'ok', sequence}
"""

DECISIONS = "return {'ok', redis.call('XREVRANGE', decisions, '+', '-', 'COUNT', ARGV[4])}"

_AFTER = """
local latest = newest(audit)
if latest ~= tonumber(ARGV[4]) then return {'ahead', latest} end
"""
"""Rejects a write that does not know the latest audit record, of number ARGV[4] (0: none)."""

ADD_AUDIT = f"""{_AFTER}
local sequence = redis.call('HINCRBY', pool, 'num_audit', 1)
if sequence <= latest then
  sequence = redis.call('HINCRBY', pool, 'num_audit', latest - sequence + 1)
end
redis.call('XADD', audit, 'MAXLEN', ARGV[6], sequence .. '-0', 'record', ARGV[5])
if ARGV[7] ~= '' then redis.call('HSET', pool, 'hold', ARGV[7]) end
redis.call('SADD', pools, name)
return {{'ok', sequence}}
"""

AUDIT = "return {'ok', redis.call('XREVRANGE', audit, '+', '-', 'COUNT', ARGV[4])}"

RESTORE = f"""{_AFTER}
local hold, num_audit = ARGV[5], tonumber(ARGV[6])
local epoch, workers, highest = ARGV[9], ARGV[10], ARGV[11]
local function append(stream, counter, num_kept, first, last)
  for place = first, last, 2 do
    local sequence, record = ARGV[place], ARGV[place + 1]
    local counted = tonumber(redis.call('HGET', pool, counter) or '0')
    if tonumber(sequence) > math.max(counted, newest(stream)) then
      redis.call('HSET', pool, counter, sequence)
      redis.call('XADD', stream, 'MAXLEN', num_kept, sequence .. '-0', 'record', record)
    end
  end
end
append(audit, 'num_audit', ARGV[7], 12, 11 + 2 * num_audit)
append(decisions, 'num_decisions', ARGV[8], 12 + 2 * num_audit, #ARGV)
if hold ~= '' then redis.call('HSET', pool, 'hold', hold) end
if tonumber(epoch) > tonumber(redis.call('HGET', pool, 'epoch') or '0') then
  redis.call('HSET', pool, 'epoch', epoch, 'workers', workers)
end
if tonumber(highest) > tonumber(redis.call('HGET', pool, 'highest') or '0') then
  redis.call('HSET', pool, 'highest', highest)
end
redis.call('SADD', pools, name)
return {{'ok'}}
"""
