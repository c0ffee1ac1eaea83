# Runs Postgres and stops it when the host is gone, however the host went.
# Arguments: the server program and its arguments. Standard input: a pipe whose other end only the host holds.
# The host started this in a process group of its own, so a ctrl-C in the terminal does not reach Postgres.
# Exits when Postgres does, with its status, so that the host notices a server that died by itself.
exec 3<&0 </dev/null
"$@" 3<&- &
server=$!
(
    # Ends at the end of the pipe: the host closed it, exited, or was killed.
    while read -r line <&3; do :; done
    tenths=0
    while kill -0 "$server" 2>/dev/null; do
        # INT is a fast shutdown. Again every second, since one that arrives before Postgres listens is lost.
        # After 30 s QUIT, an immediate one: the next start recovers from the log.
        if [ "$tenths" -ge 300 ]; then kill -QUIT "$server" 2>/dev/null
        elif [ $((tenths % 10)) -eq 0 ]; then kill -INT "$server" 2>/dev/null; fi
        tenths=$((tenths + 1))
        sleep 0.1
    done
) &
guard=$!
exec 3<&-
wait "$server"
status=$?
kill "$guard" 2>/dev/null
exit "$status"
