"""Shell commands and what each does, in our own words. One line each: name | third-person phrase."""
from __future__ import annotations

_LINES = """
ls | lists the files in a folder
cd | changes the current folder
pwd | prints the path of the current folder
mkdir | makes a new folder
rmdir | removes an empty folder
rm | deletes files
cp | copies files
mv | moves or renames files
ln | makes a link to a file
touch | makes an empty file or updates its time stamp
cat | prints the content of files one after another
tac | prints the lines of a file from last to first
less | shows a text page by page and scrolls both ways
more | shows a text one screen at a time
head | prints the first lines of a file
tail | prints the last lines of a file
grep | prints the lines that match a pattern
egrep | searches text with extended patterns
fgrep | searches text for fixed strings
zgrep | searches for a pattern inside compressed files
sed | edits a stream of text with a short script
awk | processes text field by field with a small program
cut | prints chosen columns of every line
paste | joins lines of several files side by side
join | joins two sorted files on a shared field
sort | sorts the lines of a text
uniq | drops repeated lines that stand next to each other
wc | counts lines, words and bytes
nl | prints a file with numbered lines
tr | replaces or deletes single characters
tee | copies its input to a file and to the screen
xargs | builds command lines from its input
find | searches a folder tree for files
locate | finds files by name in a prepared index
updatedb | rebuilds the index that locate uses
which | prints the path of a program
whereis | finds the program, source and manual of a name
type | tells how the shell would run a name
file | guesses what kind of data a file holds
stat | prints size, owner and times of a file
du | measures how much space folders use
df | shows the free space of mounted disks
mount | attaches a file system to a folder
umount | detaches a mounted file system
lsblk | lists disks and partitions as a tree
blkid | prints labels and identifiers of block devices
fdisk | edits the partition table of a disk
parted | creates and resizes partitions
mkfs | makes a new file system on a device
fsck | checks and repairs a file system
mkswap | prepares an area for swapping memory
swapon | turns on a swap area
swapoff | turns off a swap area
dd | copies raw blocks of data
sync | writes cached data to the disk
chmod | changes the permissions of a file
chown | changes the owner of a file
chgrp | changes the group of a file
umask | sets the default permissions of new files
chattr | changes special attributes of a file
lsattr | lists special attributes of files
getfacl | prints the access list of a file
setfacl | sets the access list of a file
id | prints user and group numbers
whoami | prints the name of the current user
who | lists the users who are logged in
w | shows who is logged in and what they do
last | lists recent logins
users | prints the login names on one line
groups | prints the groups of a user
su | switches to another user
sudo | runs a command as another user, usually root
passwd | changes a password
useradd | creates a user account
usermod | changes a user account
userdel | deletes a user account
groupadd | creates a group
groupdel | deletes a group
chsh | changes the login shell
finger | shows information about users
ps | lists running processes
top | shows the busiest processes live
htop | shows processes in a coloured live view
kill | sends a signal to a process
killall | sends a signal to processes by name
pkill | signals processes that match a pattern
pgrep | finds process numbers by name
pidof | prints the process numbers of a program
nice | starts a program with a lower priority
renice | changes the priority of a running process
nohup | keeps a program running after logout
jobs | lists the background jobs of the shell
bg | continues a stopped job in the background
fg | brings a job to the foreground
wait | waits until background jobs have ended
sleep | pauses for a given time
time | measures how long a command takes
timeout | stops a command after a given time
watch | repeats a command and shows its output
at | runs a command once at a later time
cron | runs commands on a schedule
crontab | edits the table of scheduled commands
systemctl | controls system services
journalctl | reads the log of the system services
service | starts and stops a system service
dmesg | prints the messages of the kernel
uptime | tells how long the machine has been running
free | shows used and free memory
vmstat | reports memory, paging and processor activity
iostat | reports input and output of disks
mpstat | reports the load of each processor
sar | collects and reports system activity
lscpu | prints facts about the processor
lspci | lists the devices on the PCI bus
lsusb | lists the devices on the USB bus
lshw | lists the hardware of the machine
lsmod | lists the loaded kernel modules
modprobe | loads or removes a kernel module
insmod | inserts a module into the kernel
rmmod | removes a module from the kernel
uname | prints the name and version of the kernel
hostname | prints or sets the name of the machine
hostnamectl | shows and changes the host name settings
arch | prints the machine architecture
nproc | prints the number of usable processors
date | prints or sets the date and time
cal | prints a calendar
hwclock | reads or sets the hardware clock
timedatectl | controls the clock and time zone settings
echo | prints its arguments
printf | prints text by a format
read | reads one line into a variable
test | checks a condition and returns true or false
expr | evaluates a simple expression
bc | calculates with any number of digits
dc | calculates in reverse Polish notation
seq | prints a sequence of numbers
factor | prints the prime factors of a number
yes | prints a line again and again
true | does nothing and succeeds
false | does nothing and fails
env | prints the environment or runs a program in another one
export | passes a variable on to child programs
set | shows or changes shell options and variables
unset | removes a variable of the shell
printenv | prints environment variables
alias | defines a short name for a command
unalias | removes a short name for a command
history | lists the commands typed before
source | runs a script in the current shell
exec | replaces the shell by another program
eval | runs its arguments as shell code
exit | leaves the shell
logout | ends a login shell
trap | runs a command when a signal arrives
ulimit | limits the resources of the shell
getopts | parses the options of a shell script
shift | drops the first argument of a script
basename | strips the folders from a path
dirname | strips the last part of a path
realpath | prints the absolute path of a file
readlink | prints where a symbolic link points
mktemp | makes a temporary file with a unique name
tree | draws a folder tree
pushd | saves the current folder and changes to another
popd | returns to the folder saved last
dirs | lists the saved folders
diff | compares two files line by line
diff3 | compares three files line by line
sdiff | shows two files side by side with differences
cmp | compares two files byte by byte
comm | compares two sorted files line by line
patch | applies a file of differences
split | cuts a file into pieces
csplit | cuts a file at lines that match a pattern
fold | wraps long lines to a width
fmt | reformats paragraphs of text
pr | prepares text files for printing
column | arranges lines in columns
expand | turns tabs into spaces
unexpand | turns spaces into tabs
rev | reverses the characters of every line
shuf | puts lines in random order
tsort | orders items by their dependencies
look | prints lines that begin with a string
strings | prints the readable text inside a binary file
od | dumps a file in octal and other forms
hexdump | shows a file in hexadecimal
xxd | makes a hex dump or turns one back
base64 | encodes or decodes data as base64 text
md5sum | prints the MD5 checksum of files
sha1sum | prints the SHA-1 checksum of files
sha256sum | prints the SHA-256 checksum of files
cksum | prints a checksum and the size of a file
sum | prints a simple checksum and block count
tar | packs many files into one archive
gzip | compresses a file
gunzip | unpacks a gzip file
zcat | prints the content of a compressed file
bzip2 | compresses a file with block sorting
bunzip2 | unpacks a bzip2 file
xz | compresses a file strongly
unxz | unpacks an xz file
zstd | compresses a file fast
zip | packs files into a zip archive
unzip | unpacks a zip archive
unrar | unpacks a rar archive
cpio | copies files into and out of archives
ar | makes and edits library archives
rsync | copies only what changed between two places
scp | copies files between machines over SSH
sftp | transfers files interactively over SSH
ftp | transfers files with an old protocol
ssh | opens a secure shell on another machine
sshd | answers secure shell connections
sshfs | mounts a remote folder over SSH
telnet | opens an unencrypted terminal connection
curl | transfers data from or to a URL
wget | downloads files from the web
aria2c | downloads files over several connections
ping | checks whether a machine answers
traceroute | shows the route that packets take
tracepath | traces the path to a host
mtr | combines ping and route tracing in a live view
ip | shows and changes network addresses and routes
ifconfig | configures network interfaces the old way
route | shows or changes the routing table
netstat | lists network connections the old way
ss | lists network sockets
nc | reads and writes raw network connections
nmap | scans a network for open ports
tcpdump | records packets on a network interface
dig | asks a name server for records
nslookup | looks up names and addresses of hosts
host | looks up the address of a host name
whois | looks up who owns a domain
arp | shows the table of hardware addresses
iptables | filters network packets by rules
nft | manages packet filtering rules
ufw | manages a simple firewall
iwconfig | configures a wireless interface
nmcli | controls the network manager
ethtool | shows and changes settings of a network card
mail | sends and reads mail in the terminal
write | sends a message to another user's terminal
wall | sends a message to all terminals
mesg | allows or forbids messages to your terminal
talk | lets two users chat in the terminal
man | shows the manual page of a command
info | reads long documentation with menus
apropos | searches the descriptions of manual pages
whatis | prints the one-line description of a command
help | explains a command built into the shell
vi | edits text in a classic screen editor
vim | edits text in an improved vi
nvim | edits text in a modern vim
nano | edits text in a simple screen editor
emacs | edits text in an extensible editor
ed | edits text line by line
tmux | keeps several terminals in one window
screen | keeps terminals alive after you disconnect
script | records a terminal session
clear | clears the screen
reset | restores a broken terminal
tput | controls the terminal by capability names
stty | changes the settings of the terminal line
tty | prints the name of the terminal
lp | prints a file on a printer
lpr | sends a file to the printer
lpq | lists the waiting print jobs
lprm | cancels a print job
make | builds programs from rules in a makefile
cmake | generates build files for a project
ninja | runs builds very fast
gcc | compiles C programs
clang | compiles C programs with LLVM
ld | links object files into a program
as | translates assembly code
nm | lists the symbols of an object file
objdump | shows the content of object files
readelf | shows the structure of ELF files
ldd | lists the shared libraries of a program
ldconfig | refreshes the cache of shared libraries
strip | removes symbols from a program
gdb | debugs a running program
strace | traces the system calls of a program
ltrace | traces the library calls of a program
valgrind | finds memory errors in programs
perf | measures the performance of programs
gprof | shows where a program spends its time
git | keeps the history of source code
svn | keeps source code in a central repository
hg | keeps source code with the Mercurial system
python | runs Python programs
pip | installs Python packages
perl | runs Perl programs
ruby | runs Ruby programs
node | runs JavaScript outside a browser
npm | installs JavaScript packages
java | runs compiled Java programs
javac | compiles Java source code
go | builds and runs Go programs
cargo | builds and manages Rust projects
rustc | compiles Rust source code
apt | installs and removes packages on Debian systems
dpkg | installs single Debian package files
dnf | installs packages on Fedora systems
yum | installs packages on older Red Hat systems
rpm | manages Red Hat package files
pacman | installs packages on Arch systems
brew | installs packages on a Mac
snap | installs confined application packages
flatpak | installs sandboxed desktop applications
docker | runs programs in containers
podman | runs containers without a daemon
kubectl | controls a Kubernetes cluster
virsh | manages virtual machines
chroot | runs a program with another root folder
lsof | lists open files and who uses them
fuser | shows which processes use a file
ipcs | lists shared memory and message queues
jq | filters and reshapes JSON data
gpg | encrypts and signs data
openssl | works with certificates and encryption
shred | overwrites a file before deleting it
truncate | sets the size of a file
fallocate | reserves space for a file
rename | renames many files by a pattern
convert | converts images between formats
ffmpeg | converts audio and video
sqlite3 | runs queries on a database file
shutdown | turns the machine off at a given time
reboot | restarts the machine
halt | stops the machine
poweroff | turns the machine off
"""

COMMANDS: tuple[tuple[str, str], ...] = tuple((a.strip(), b.strip()) for a, b in (line.split("|") for line in _LINES.strip().splitlines()))
