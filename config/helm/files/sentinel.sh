#!/bin/sh
# Starts one of several Redis servers (`sentinel.sh server`; further arguments are options of redis-server), or its
# Sentinel (`sentinel.sh sentinel`). Both run in the directory of their volume.
#
# SELF: the host name of this server. PEERS: the host names of all servers; the first is the initial primary.
# REDIS_REPLICA_PASSWORD: authenticates replicas and Sentinels. start.sh describes the other passwords.
set -eu
umask 077
here=$(dirname "$0")
kept=$PWD/sentinel.conf

# Prints the host of the primary. Asks another Sentinel, because the Sentinel of this volume can have missed a failover.
# If none answers: the primary that this Sentinel stored last, or, in a new fleet, the first server.
find_primary() {
    for peer in $PEERS; do
        [ "$peer" != "$SELF" ] || continue
        # A reply has two lines, host and port. An error has one line.
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
password=${REDIS_REPLICA_PASSWORD:?set the password of replicas and Sentinels}
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

# Keep Sentinel's own lines in the file; replace users, passwords and the timeout. A client without a password can only
# look up the primary.
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
