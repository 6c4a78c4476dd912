#!/bin/sh
# Unpacks the libraries and headers of an old Linux, without installing anything: fetch.sh ARCHITECTURE FOLDER
# Downloads the packages in packages.txt for the architecture, and verifies their digests. Needs curl, ar and xz.
set -eu
list=$(dirname "$0")/packages.txt
architecture=$1
folder=$2
rm -rf "$folder.part"
mkdir -p "$folder.part/packages"
grep "^$architecture " "$list" > "$folder.part/list" || { echo "error: $list has no packages for $architecture" >&2; exit 1; }
while read -r _ digest path; do
    package="$folder.part/packages/$(basename "$path")"
    curl --fail --silent --show-error --location --retry 3 --output "$package" "http://archive.ubuntu.com/ubuntu/pool/$path"
    echo "$digest  $package" | sha256sum --check --quiet -
    ar p "$package" data.tar.xz | tar --extract --xz --directory "$folder.part"
done < "$folder.part/list"
# A link such as libdl.so -> /lib/x86_64-linux-gnu/libdl.so.2 must not lead to this machine's library.
find "$folder.part" -type l -lname '/*' | while read -r link; do
    ln -snf "$(realpath --relative-to "$(dirname "$link")" --no-symlinks "$folder.part$(readlink "$link")")" "$link"
done
# A manylinux_2_28 wheel may need libstdc++ only as GCC 7 has it. As in Red Hat's compilers for old systems, a static
# library of this name has the newer functions that are used: std::random_device::entropy() of GCC 8.
for static in "$folder.part"/usr/lib/gcc*/*/8/libstdc++.a; do
    ar p "$static" random.o > "$folder.part/random.o"
    ar rcs "$(dirname "$static")/libstdc++_nonshared.a" "$folder.part/random.o"
    rm "$folder.part/random.o"
done
# GCC looks for OpenMP's library by this name, which a package that is not needed otherwise would have.
if [ -e "$folder.part/usr/lib/x86_64-linux-gnu/libgomp.so.1" ]; then
    ln -s libgomp.so.1 "$folder.part/usr/lib/x86_64-linux-gnu/libgomp.so"
fi
rm -r "$folder.part/packages" "$folder.part/list"
rm -rf "$folder"
mv "$folder.part" "$folder"
touch "$folder"
