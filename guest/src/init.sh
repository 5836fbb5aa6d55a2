#!/usr/bin/busybox sh
# First process of the test guest: mounts file systems, then serves the agent's serial port. frame.rs
# describes the protocol.
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
    # An end of file means that the port was hung up. The loop continues.
    read -r verb sequence command <&3 || { sleep 1; continue; }
    [ "$verb" = @RUN ] || continue
    printf '%s' "$command" | base64 -d >/tmp/.agent.command
    # The command runs in its own session, so that its background processes block neither this
    # shell nor the port. Its output is a file, so that they do not delay the answer either.
    setsid sh /tmp/.agent.command >/tmp/.agent.output 2>&1 </dev/null 3>&-
    code=$?
    # Background processes of the command may still write to the file. The answer is its content at
    # this time, or only the end of the content if that is too long for a serial port.
    tail -c 1000000 /tmp/.agent.output >/tmp/.agent.answer
    {
        printf '@END %s %s %s ' "$sequence" "$code" "$(stat -c %s /tmp/.agent.answer)"
        base64 -w 0 /tmp/.agent.answer
        echo
    } >&3
    # Background processes of this command may still write to the file, so the next command gets a
    # new one.
    rm -f /tmp/.agent.output
done
