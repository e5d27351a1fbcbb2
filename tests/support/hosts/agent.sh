#!/bin/bash
# agent.sh ADDRESS COMMAND...: takes the place of ssh. Runs COMMAND on the host with this address; the last number of
# ADDRESS is the number of the host.
while [[ $1 == -* ]]; do shift; done  # options of ssh
number=${1##*.}; shift
if [ -n "$MPITRAIN_TEST_GONE" ] && grep -qx "$number" "$MPITRAIN_TEST_GONE" 2>/dev/null; then
    echo "ssh: connect to host h$number port 22: No route to host" >&2
    exit 255
fi
export TMPDIR=$MPITRAIN_TEST_TMP/h$number
disk=  # a folder that is on another disk on each host
[ -z "$MPITRAIN_TEST_DISK" ] || disk="mount --rbind '$TMPDIR' '$MPITRAIN_TEST_DISK' || exit; "
exec ip netns exec "$MPITRAIN_TEST_HOSTS$number" unshare --uts \
    bash -c "${disk}hostname h$number; exec bash -c \"\$0\"" "$*"
