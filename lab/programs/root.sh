# shellcheck shell=sh
# First program of a guest whose root file system is on its first disk, in its initramfs: loads drivers, and our module if the kernel's word
# plimsoll.module=copy asks for it, with the parameters NAME of words plimsoll.module.NAME=; then goes on with init.sh.
set -eu
/bin/busybox --install -s /bin
export PATH=/bin:/sbin
mount -t devtmpfs devtmpfs /dev
mount -t proc proc /proc
mount -t sysfs sysfs /sys
trap 'echo "programs: error cannot reach the root file system"; echo o >/proc/sysrq-trigger; sleep 60' EXIT

for module in $(awk '$1 == "disk" && !seen[$2]++ { print $2 }' /modules/order); do
    insmod "/modules/$module"
done
until [ -b /dev/vdb ]; do sleep 0.1; done
if grep -q 'plimsoll\.module=copy' /proc/cmdline; then
    # shellcheck disable=SC2046 # words
    insmod /modules/plimsoll.ko control=/dev/vdb $(grep -o 'plimsoll\.module\.[^ ]*' /proc/cmdline | cut -d. -f3-)
fi
mkdir /new
mount -t ext4 /dev/vda /new
mount -o move /dev /new/dev
umount /proc /sys
trap - EXIT
exec switch_root /new /init.sh
