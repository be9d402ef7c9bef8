#!/bin/sh
# Builds stress.c with the sanitizers and runs it: run.sh [events of each round]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
native=$here/../../ceedtap/native
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
sources="$here/stress.c $native/queue.c $native/registry.c $native/lock.c"

for sanitizers in address,undefined thread; do
    echo "-- $sanitizers"
    ${CC:-gcc} -std=gnu11 -g -O1 -Wall -Wextra -Wno-unused-parameter -fno-omit-frame-pointer -fno-sanitize-recover=all \
        -fsanitize=$sanitizers -I"$native" $sources -o "$build/stress" -pthread
    TSAN_OPTIONS="halt_on_error=1 exitcode=66" "$build/stress" "${1:-1000000}"
done
