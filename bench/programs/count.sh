#!/bin/bash
# count.sh SECONDS: a program that is not Python. Writes its rank to a file after this time.
for ((second = 1; second <= $1; second++)); do
    sleep 1
    echo "second $second"
done
echo "rank $RANK of $WORLD_SIZE, local rank $LOCAL_RANK of $LOCAL_WORLD_SIZE" >"result-$RANK.txt"
