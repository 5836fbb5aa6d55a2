#!/usr/bin/busybox sh
# The first process of the test guest: mounts what programs expect, then serves the agent's serial
# port for ever. The language is described in frame.rs.
export PATH=/usr/sbin:/usr/bin HOME=/root TERM=dumb LANG=C
busybox mount -t proc proc /proc
busybox mount -t sysfs sysfs /sys
busybox mount -t devtmpfs devtmpfs /dev
busybox mkdir -p /dev/shm /tmp /run /mnt /root
busybox mount -t tmpfs tmpfs /tmp
busybox mount -t tmpfs tmpfs /dev/shm
busybox mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null
busybox --install -s /opt/busybox 2>/dev/null
export PATH=$PATH:/opt/busybox

port=/dev/ttyS1
stty -F $port raw -echo 115200
exec 3<>$port
printf '\n@HELLO %s\n' "$(cat /proc/sys/kernel/random/boot_id)" >&3
while true; do
    # An end of file is a hang-up of the port, not the end of the work.
    read -r verb sequence command <&3 || { sleep 1; continue; }
    [ "$verb" = @RUN ] || continue
    printf '%s' "$command" | base64 -d >/tmp/.agent.command
    # The command runs as a session of its own: what it leaves in the background holds neither this
    # shell nor the port. Its output goes to a file, so such a leftover does not hold the answer.
    setsid sh /tmp/.agent.command >/tmp/.agent.output 2>&1 </dev/null 3>&-
    code=$?
    # A leftover may still be writing: what is answered is what there was at this moment; the last
    # of it if it is too much for a serial port.
    tail -c 1000000 /tmp/.agent.output >/tmp/.agent.answer
    {
        printf '@END %s %s %s ' "$sequence" "$code" "$(stat -c %s /tmp/.agent.answer)"
        base64 -w 0 /tmp/.agent.answer
        echo
    } >&3
    # A new file each time: a leftover of the last command still writes to the old one.
    rm -f /tmp/.agent.output
done
