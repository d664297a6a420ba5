#!/bin/sh
# Starts redis-server with redis.conf and the users of users.acl. Further arguments are options of redis-server.
#
# The passwords are in REDIS_GATEWAY_PASSWORD, REDIS_WORKER_PASSWORD and, for nodes and KEDA, REDIS_NODE_PASSWORD and
# REDIS_KEDA_PASSWORD. The server gets only their digests, in a file that only its user can read. Its environment has
# no passwords.
set -eu
here=$(dirname "$0")

digest() {
    printf %s "$1" | sha256sum | cut -d ' ' -f 1
}

gateway=$(digest "${REDIS_GATEWAY_PASSWORD:?set the password of the gateways}")
worker=$(digest "${REDIS_WORKER_PASSWORD:?set the password of the workers}")
node=$(digest "${REDIS_NODE_PASSWORD:-$(head -c 32 /dev/urandom | sha256sum)}")
keda=$(digest "${REDIS_KEDA_PASSWORD:-$(head -c 32 /dev/urandom | sha256sum)}")
umask 077
users=$(mktemp)
sed -e '/^#/d' -e ':join' -e '/\\$/{N;s/\\\n *//;b join' -e '}' \
    -e "s/GATEWAY_SHA256/$gateway/" -e "s/WORKER_SHA256/$worker/" -e "s/NODE_SHA256/$node/" \
    -e "s/KEDA_SHA256/$keda/" \
    "$here/users.acl" >"$users"
unset REDIS_GATEWAY_PASSWORD REDIS_WORKER_PASSWORD REDIS_NODE_PASSWORD REDIS_KEDA_PASSWORD
exec redis-server "$here/redis.conf" --aclfile "$users" "$@"
