#!/bin/bash
# agent.sh ADDRESS COMMAND...: stands in for ssh. Runs COMMAND in the host that owns ADDRESS, whose last number is
# the host's own.
number=${1##*.}; shift
exec ip netns exec "$MPITRAIN_TEST_HOSTS$number" unshare --uts \
    bash -c "hostname h$number; exec bash -c \"\$0\"" "$*"
