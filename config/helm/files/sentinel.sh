#!/bin/sh
# One of several Redis servers (`sentinel.sh server`, further arguments are options of redis-server), or the Sentinel
# beside it (`sentinel.sh sentinel`). Both work in the directory of their volume.
#
# SELF: the host name of this server. PEERS: those of all, the first of which begins as the primary.
# REDIS_REPLICA_PASSWORD: by which replicas and Sentinels know each other. The others are those of start.sh.
set -eu
umask 077
here=$(dirname "$0")
kept=$PWD/sentinel.conf

# The primary: as another Sentinel says, for the one here may have missed a failover; else as the Sentinel on this
# volume knew last; else the first server.
find_primary() {
    for peer in $PEERS; do
        [ "$peer" != "$SELF" ] || continue
        # Two lines, host and port; an error has one.
        said=$(timeout 2 redis-cli -h "$peer" -p 26379 sentinel get-master-addr-by-name fleet 2>/dev/null) || continue
        if [ "$(echo "$said" | sed -n 2p)" = 6379 ]; then
            echo "$said" | sed -n 1p
            return
        fi
    done
    if [ -f "$kept" ]; then
        sed -n 's/^sentinel monitor fleet "\{0,1\}\([^" ]*\).*/\1/p' "$kept"
    else
        echo "${PEERS%% *}"
    fi
}

primary=$(find_primary)
password=${REDIS_REPLICA_PASSWORD:?the password of replicas and Sentinels}
digest=$(printf %s "$password" | sha256sum | cut -d ' ' -f 1)
unset REDIS_REPLICA_PASSWORD

if [ "$1" = server ]; then
    shift
    config=${TMPDIR:-/tmp}/redis
    rm -rf "$config"
    mkdir "$config"
    for name in redis.conf start.sh users.acl; do
        cat "$here/$name" >"$config/$name"
    done
    cat >>"$config/users.acl" <<END
user replica reset on #$digest +ping +psync +replconf
user sentinel reset on #$digest &* +ping +info +role +publish +subscribe +multi +exec +slaveof +replicaof +config|rewrite +client|setname +client|kill +script|kill
END
    cat >>"$config/redis.conf" <<END
replica-announce-ip $SELF
masteruser replica
masterauth "$password"
END
    if [ "$primary" != "$SELF" ]; then
        echo "replicaof $primary 6379" >>"$config/redis.conf"
    fi
    exec sh "$config/start.sh" "$@"
fi

# What Sentinel writes there itself is kept, but for users and passwords. Whoever has no password may ask for the
# primary, and nothing else.
if [ ! -f "$kept" ]; then
    cat >"$kept" <<END
port 26379
protected-mode no
sentinel resolve-hostnames yes
sentinel announce-hostnames yes
sentinel announce-ip $SELF
sentinel monitor fleet $primary 6379 2
sentinel parallel-syncs fleet 1
sentinel failover-timeout fleet 30000
END
fi
{
    grep -v -e '^user ' -e ' auth-user ' -e ' auth-pass ' -e ' sentinel-user ' -e ' sentinel-pass ' -e ' down-after-' "$kept"
    cat <<END
sentinel down-after-milliseconds fleet $DOWN_AFTER_MS
sentinel auth-user fleet sentinel
sentinel auth-pass fleet "$password"
sentinel sentinel-user sentinel
sentinel sentinel-pass "$password"
user default reset on nopass +ping +sentinel|masters +sentinel|get-master-addr-by-name
user sentinel reset on #$digest &* +@all
END
} >"$kept.new"
mv "$kept.new" "$kept"
shift
exec redis-server "$kept" --sentinel "$@"
