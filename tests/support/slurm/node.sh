#!/bin/bash
# First process of a node: gives the node a name, an address and its own /proc, then runs slurmd and waits for its end.
#
# Requires NODE (the node's name), ADDRESS (with the prefix length), STATE (the cluster's folder) and SLURM_CONF.
hostname "$NODE"
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
mount --bind "$STATE/etc/hosts" /etc/hosts
# Slurm's pmix plugin opens libpmix.so, which only Debian's development package has: a copy of the folder has a link.
pmix=/usr/lib/x86_64-linux-gnu/pmix2/lib
[ -d "$STATE/pmix" ] && [ ! -e $pmix/libpmix.so ] && mount --bind "$STATE/pmix" $pmix
for _ in {1..250}; do ip link show eth0 >/dev/null 2>&1 && break; sleep 0.02; done
ip link set lo up
ip addr add "$ADDRESS" dev eth0
ip link set eth0 up
slurmd -D -N "$NODE" -s </dev/null >/dev/null 2>&1 &
slurmd=$!
trap 'kill $slurmd' TERM INT
while kill -0 $slurmd 2>/dev/null; do wait -n 2>/dev/null; done # the first process also waits for orphans
