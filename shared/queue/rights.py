"""Redis permissions of gateways and workers, the same as in `config/redis/users.acl`."""

from dataclasses import dataclass

from shared.queue.keys import RedisKeys


@dataclass(frozen=True, slots=True)
class Rights:
    """Permissions of one user: key patterns, and commands as in Redis ACLs."""

    keys: tuple[str, ...]
    commands: tuple[str, ...]


_KEYS = RedisKeys()
#: Keys of the queues, used by gateways and workers. `*`: any name.
_QUEUE_KEYS = (
    _KEYS.queue("*"),
    _KEYS.backlog("*"),
    _KEYS.reservations("*"),
    _KEYS.request("*", "*"),
    _KEYS.log("*", "*"),
    _KEYS.result("*", "*", "*"),
    _KEYS.mailbox("*", "*"),
    _KEYS.preferred_worker("*", "*"),
    _KEYS.wakeups("*", "*"),
    _KEYS.left("*", "*"),
    _KEYS.spent + "*",
    _KEYS.budget("*", "*"),
)
_DEPLOY_KEYS = (_KEYS.apps, _KEYS.nodes, _KEYS.node("*"), _KEYS.app_log("*"))
_FLEET_KEYS = (
    _KEYS.blob("*"),
    _KEYS.workers,
    _KEYS.worker("*"),
    _KEYS.models,
    _KEYS.model("*"),
    _KEYS.adapters("*"),
    _KEYS.shards,
)

GATEWAY = Rights(
    keys=(
        *_QUEUE_KEYS,
        *_FLEET_KEYS,
        *_DEPLOY_KEYS,
        _KEYS.usage("*"),
        _KEYS.rates("*", "*"),
        _KEYS.stream("*"),
        _KEYS.confirmation,
        _KEYS.api_keys,
        _KEYS.guests,
        _KEYS.audit,
        _KEYS.blob_holders("*"),
        _KEYS.lease("*"),
        _KEYS.record("*", "*"),
        _KEYS.records("*"),
        _KEYS.record_sizes("*"),
        _KEYS.record_reply("*", "*"),
        _KEYS.session("*"),
        _KEYS.session_tasks("*"),
        _KEYS.session_open("*"),
        _KEYS.sessions("*"),
        _KEYS.session_limits("*"),
    ),
    commands=(
        *("eval", "evalsha", "time", "info", "role", "wait"),
        *("get", "set", "mget", "del", "exists", "pexpire", "pttl"),
        *("hexists", "hget", "hgetall", "hmget", "hset", "hdel", "hlen", "hvals"),
        *("hincrby", "hsetnx", "lrange", "smembers", "srem"),
        *("zadd", "zcard", "zrem", "zremrangebyscore", "zrange", "zrevrange", "zrevrank"),
        *("zrangebyscore", "xadd", "xlen", "xread", "xrange", "xrevrange", "xtrim"),
        *("xack", "xdel", "xclaim", "xpending"),
    ),
)
WORKER = Rights(
    keys=(*_QUEUE_KEYS, *_FLEET_KEYS, _KEYS.scan("*"), _KEYS.dead("*"), _KEYS.crash("*", "*")),
    commands=(
        *("eval", "evalsha", "time"),
        *("get", "set", "del", "exists", "pexpire", "pttl"),
        *("hget", "hgetall", "hmget", "hset", "hdel", "hincrby", "hsetnx"),
        *("lrange", "rpush", "sadd", "srem", "zadd", "zrem"),
        *("xadd", "xlen", "xrange", "xreadgroup", "xclaim", "xpending", "xack", "xdel"),
        *("xgroup|create", "xgroup|delconsumer", "xinfo|consumers"),
    ),
)
#: A node cancels requests and removes models as well; its workers connect as `worker`.
NODE = Rights(
    keys=(*WORKER.keys, *_DEPLOY_KEYS, _KEYS.claims("*"), _KEYS.session_limits("*")),
    commands=(*WORKER.commands, "mget", "smembers", "ltrim", "zrangebyscore"),
)
#: KEDA only counts waiting requests.
KEDA = Rights(keys=(_KEYS.queue("*"),), commands=("ping", "info", "xlen", "xinfo|groups"))
USERS = {"gateway": GATEWAY, "worker": WORKER, "node": NODE, "keda": KEDA}
