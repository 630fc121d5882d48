# cython: language_level=3, boundscheck=False, wraparound=False, embedsignature=True
"""The request reader of request_reader.py once more, compiled: it reads, looks, counts and writes.

It answers the same requests in the same way. Of an open or close of a known reader it does itself
what SharedHandles.enter and leave do where nothing has changed; in all other cases it calls them.
So no rule has a second home here: each `# As` names the code that this one must equal, and
tests/fuse/channel/test_compiled_reader_model.py compares both, message by message (docs/dev/compiled.md).
All of a request runs with the GIL held and without Python code, so nothing comes in between.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport PyObject
from libc.errno cimport EAGAIN, EINTR, ENODATA, errno
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.unistd cimport read, write

import os

from kvfs.core.lifecycle import UNFINISHED

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    int c_poll "poll"(pollfd *fds, unsigned long count, int timeout_ms)
    short POLLIN

cdef extern from "Python.h":
    PyObject *PyDict_GetItemWithError(object, object) except? NULL

cdef enum:
    # As linux/fuse.h, mount/fuse/wire.py.
    FORGET = 2
    GETATTR = 3
    OPEN = 14
    RELEASE = 18
    GETXATTR = 22
    BATCH_FORGET = 42
    IN_HEADER_BYTES = 40
    OUT_HEADER_BYTES = 16
    OPEN_OUT_BYTES = 16
    ATTR_OUT_HEAD_BYTES = 16
    ATTR_OUT_BYTES = 104
    ASKED_BYTES = 48
    NAME_OFFSET = 48
    # As request_reader.py.
    SURE = 2
    WAKING = 3
    POLL_MS = 15
    OPCODES_MAX = 64
    LOADS = OPCODES_MAX
    LOADS_DIVISOR = 5
    # As handles.py.
    ROWS_START = 4096
    ROW_BYTES = 96
    OPENS_OFFSET = 24
    # As kvfs/core/records.py, kvfs/core/types.py, sys/stat.h.
    INODE_PREFIX = 5
    KEY_BYTES = 9
    SECOND_NS = 1_000_000_000
    STAT_BLOCK_BYTES = 512
    PAGE_BYTES = 4096
    TYPE_MASK = 0o170000
    DIRECTORY = 0o040000
    # As heat.py.
    PARTS = 256
    SHIFT = 24
    TOUCHES_MAX = (1 << 16) - 1

cdef uint64_t SPREAD = 0x9E3779B1
cdef uint64_t LINKS_MAX = 0xFFFFFFFF

cdef struct Attr:
    # As struct fuse_attr.
    uint64_t ino, size_bytes, blocks
    int64_t atime_s, mtime_s, ctime_s
    uint32_t atime_ns, mtime_ns, ctime_ns
    uint32_t mode, links, uid, gid, device, block_bytes, flags

cdef struct Attributes:
    uint8_t head[ATTR_OUT_HEAD_BYTES]
    Attr attr

cdef union Body:
    uint8_t opened[OPEN_OUT_BYTES]
    Attributes attributes

cdef struct Reply:
    uint32_t length
    int32_t error
    uint64_t unique
    Body body


cdef int64_t _now_ns() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec * <int64_t>1000000000 + now.tv_nsec


cdef class View:
    """The memory of one object, for as long as that object is the one in use."""

    cdef object _of
    cdef Py_buffer _buffer

    cdef void *of(self, object owner) except NULL:
        """Return the memory of *owner*; looks it up anew only if that is another one."""
        if self._of is not owner:
            self.let_go()
            PyObject_GetBuffer(owner, &self._buffer, PyBUF_SIMPLE | PyBUF_WRITABLE)
            self._of = owner
        return self._buffer.buf

    cdef void let_go(self):
        if self._of is not None:
            PyBuffer_Release(&self._buffer)
            self._of = None

    def __dealloc__(self):
        if self._of is not None:
            PyBuffer_Release(&self._buffer)


cdef class CompiledReader:
    """Reads the requests of one mount into one buffer; as RequestReader, which explains all of it."""

    cdef public long left
    #: How many requests no Python code has seen.
    cdef readonly unsigned long native
    cdef int _fd
    cdef View _buffer
    cdef list _requests, _answered
    cdef object _owner, _reply, _readers, _others, _servers, _idle, _clock_ns
    cdef Reply _answered_with
    cdef int _turn_messages, _last_code
    cdef int64_t _turn_ns, _turn_ends_ns, _busy_ns
    cdef int _streaks[OPCODES_MAX + 1]
    # Of SharedHandles: all but `_rows` and `_memory` are the same objects for ever.
    cdef dict _shared, _parked
    cdef list _parts
    cdef Py_ssize_t _most
    cdef object _records, _inodes, _heat, _handles, _loaded, _not_followed, _opened
    cdef View _memory, _ino, _touched, _touches, _name_hash
    cdef list _part_views
    # Of Attributes: the same objects for ever.
    cdef object _removed, _proofs
    cdef View _attributes_head

    def __init__(
        self, int device_fd, buffer, int busy_poll_us, counted, reply, readers, idle,
        turn_messages, turn_ns, clock_ns=None,
    ):
        """The arguments of RequestReader, and what is left of a turn when it begins."""
        self._fd = device_fd
        self._owner, self._buffer = buffer, View()
        self._buffer.of(buffer)
        self._busy_ns = busy_poll_us * 1000
        self._requests, self._answered = counted
        self._reply, self._idle, self._clock_ns = reply, idle, clock_ns
        self._turn_messages, self._turn_ns = turn_messages, turn_ns
        self._readers = readers
        self._others = self._servers = ()
        if readers is not None:
            self._others, self._servers = readers.others, readers.servers
            self._know(readers.known())

    def _know(self, known):
        """Take what opens and closes of known readers look at and count in."""
        self._shared, self._most = known.shared, known.most
        self._inodes, self._parked, self._records = known.inodes, known.inodes.parked, known.records
        self._handles, self._heat = known.handles, known.heat
        self._loaded, self._not_followed = known.loaded, known.not_followed
        self._opened = known.opened
        self._parts = known.heat._table._parts
        self._part_views = [View() for _ in range(PARTS)]
        self._memory, self._ino, self._touched = View(), View(), View()
        self._touches, self._name_hash = View(), View()
        self._removed, self._proofs = known.removed, known.proofs
        self._attributes_head = View()
        self._attributes_head.of(known.attributes_head)

    def answer_nothing(self):
        """Answer no request here any more, and do no idle work."""
        cdef View view
        if self._readers is not None:
            for view in (
                self._memory, self._ino, self._touched, self._touches, self._name_hash,
                self._attributes_head, *self._part_views,
            ):
                view.let_go()
        self._readers = self._idle = None

    def begin_turn(self):
        """Begin a turn, after the other tasks had theirs."""
        self.left = self._turn_messages
        self._turn_ends_ns = self._now() + self._turn_ns

    cdef int64_t _now(self) except? -1:
        return _now_ns() if self._clock_ns is None else <int64_t>self._clock_ns()

    # ---- the loop ----

    def next(self, *, bint may_wait):
        """Read the next request that is not answered here, and return its size in bytes.

        0 if there is none, or if ``left`` ran out. Raises OSError, as read(2) on the device.
        """
        cdef Py_ssize_t size_bytes
        cdef uint8_t *request = <uint8_t *>self._buffer._buffer.buf
        cdef uint32_t opcode
        while self.left > 0:
            self.left -= 1
            size_bytes = self._read()
            if size_bytes < 0:  # nothing waits; of poll(2) it would need two calls to find out
                if self._idle is not None and self._idle():
                    continue
                if not (may_wait and self._wait()):
                    return 0
                if self._now() >= self._turn_ends_ns:
                    self.left = 0  # this request is the turn's last
                size_bytes = self._read()
                if size_bytes < 0:
                    continue  # it was aborted meanwhile
            opcode = (<uint32_t *>request)[1]
            self._last_code = opcode if opcode < OPCODES_MAX else 0
            if self._readers is None or size_bytes < ASKED_BYTES:
                return size_bytes
            if opcode == FORGET or opcode == BATCH_FORGET:  # nobody counts lookups
                self._requests[opcode] += 1
                continue
            if opcode != OPEN and opcode != RELEASE and opcode != GETXATTR and opcode != GETATTR:
                return size_bytes
            try:
                if not self._answer(opcode, request):
                    return size_bytes
            except Exception:
                # It fails again in the channel, which answers with the error; the mount must go on.
                return size_bytes
            self._requests[opcode] += 1
            self._answered[opcode] += 1
            if write(self._fd, &self._answered_with, self._answered_with.length) < 0:
                # It fails there again, which is told of.
                self._reply((<char *>&self._answered_with)[:self._answered_with.length])
        return 0

    cdef Py_ssize_t _read(self) except? -2:
        """Read one request; return its size in bytes, -1 if none waits."""
        cdef Py_ssize_t size_bytes
        while True:
            size_bytes = read(self._fd, self._buffer._buffer.buf, self._buffer._buffer.len)
            if size_bytes >= 0:
                return size_bytes
            if errno == EAGAIN:
                return -1
            if errno != EINTR:
                raise OSError(errno, os.strerror(errno))
            PyErr_CheckSignals()

    # As BusyPoll.wait.
    cdef bint _wait(self) except -1:
        """Wait for the next request; False if none came."""
        cdef int after = self._last_code, came = 0
        cdef int64_t began_ns, busy_ns = self._busy_ns
        cdef pollfd device
        if after == LOADS:
            busy_ns //= LOADS_DIVISOR
        device.fd, device.events = self._fd, POLLIN
        with nogil:
            began_ns = _now_ns()
            if self._streaks[after] >= SURE:
                while came <= 0 and _now_ns() - began_ns < busy_ns:
                    came = c_poll(&device, 1, 0)
                if came <= 0:
                    self._streaks[after] = 0
                    came = c_poll(&device, 1, POLL_MS)
            else:
                came = c_poll(&device, 1, POLL_MS)
                if came > 0 and _now_ns() - began_ns < WAKING * busy_ns:
                    self._streaks[after] += 1
                else:
                    self._streaks[after] = 0
        if came < 0:
            PyErr_CheckSignals()
        return came > 0

    cdef bint _answer(self, uint32_t opcode, uint8_t *request) except -1:
        """Do what the request asks for and make the answer, if it is one for here."""
        cdef uint64_t argument = (<uint64_t *>(request + IN_HEADER_BYTES))[0]
        cdef uint64_t ino = (<uint64_t *>(request + 16))[0]
        cdef Reply *reply = &self._answered_with
        cdef bytes told
        reply.unique = (<uint64_t *>(request + 8))[0]
        reply.error = 0
        reply.length = OUT_HEADER_BYTES
        if opcode == OPEN:
            shared = self._enter(
                ino, <uint32_t>argument, reply.unique,
                (<uint32_t *>(request + 24))[0], (<uint32_t *>(request + 32))[0],
            )
            if shared is None:
                return False
            told = shared.told
            self._last_code = LOADS
            reply.length += OPEN_OUT_BYTES
            memcpy(reply.body.opened, <const char *>told, OPEN_OUT_BYTES)
        elif opcode == RELEASE:
            if not self._leave(ino, argument, reply.unique):
                return False
            self._last_code = LOADS
        elif opcode == GETATTR:
            if not self._attributes(ino, &reply.body.attributes):
                return False
            reply.length += ATTR_OUT_BYTES
        elif memcmp(request + NAME_OFFSET, b"security.", 9) == 0:
            reply.error = -ENODATA
        else:
            return False
        return True

    # ---- attributes ----

    # As Answers.attributes, Blocks.present, Namespace.record; _attr of fast.py.
    cdef bint _attributes(self, uint64_t ino, Attributes *told) except -1:
        """Write what the index's cache says of *ino*; False if others must answer."""
        cdef object number = ino
        cdef PyObject *found = PyDict_GetItemWithError(self._inodes, number)
        if found is not NULL:
            opened = <object>found
            if opened.writers or opened.quiet_writers or opened.gone is not None:
                return False
        elif number in self._removed:
            return False
        if self._proofs.in_doubt:
            return False
        cdef uint8_t key[KEY_BYTES]
        cdef int place
        key[0] = INODE_PREFIX
        for place in range(8):
            key[place + 1] = <uint8_t>(ino >> (56 - 8 * place))
        found = PyDict_GetItemWithError(
            self._records, PyBytes_FromStringAndSize(<char *>key, KEY_BYTES)
        )
        if found is NULL:
            return False
        cdef tuple record = <tuple>found
        cdef Attr *attr = &told.attr
        attr.mode, attr.uid, attr.gid = record[0], record[1], record[2]
        if record[15] or record[3] in UNFINISHED:  # a symlink, one of two names, or a draft
            return False
        attr.links = 1
        if attr.mode & TYPE_MASK == DIRECTORY:
            attr.links = min(2 + <uint64_t>record[12], LINKS_MAX)
        attr.ino, attr.size_bytes = ino, record[4]
        attr.blocks = <uint64_t>record[5] // STAT_BLOCK_BYTES
        self._time(record[6], &attr.atime_s, &attr.atime_ns)
        self._time(record[7], &attr.mtime_s, &attr.mtime_ns)
        self._time(record[8], &attr.ctime_s, &attr.ctime_ns)
        attr.device, attr.block_bytes, attr.flags = 0, PAGE_BYTES, 0
        memcpy(told.head, self._attributes_head._buffer.buf, ATTR_OUT_HEAD_BYTES)
        self.native += 1
        return True

    cdef void _time(self, int64_t time_ns, int64_t *whole_s, uint32_t *rest_ns):
        whole_s[0] = time_ns // SECOND_NS  # rounded down, as divmod does
        rest_ns[0] = <uint32_t>(time_ns - whole_s[0] * SECOND_NS)

    # ---- known readers ----

    # As SharedHandles.enter, OpenInodes.enter_again.
    cdef object _enter(
        self, uint64_t ino, uint32_t flags, uint64_t unique, uint32_t uid, uint32_t tid
    ):
        """Count an open; return what is shared, None if others must answer."""
        cdef object number = ino
        cdef PyObject *found
        if tid not in self._others:
            if tid in self._servers:
                return self._readers.enter_served(number, flags, unique, uid, tid)
            return None
        found = PyDict_GetItemWithError(self._shared, number)
        if found is NULL:
            return None
        shared = <object>found
        handle = shared.handle
        if handle.flags != flags or shared.uid != uid:
            return None
        opened = shared.opened
        # Atomic: no checkpoint, and no other thread, from here until the handle is counted.
        if PyDict_GetItemWithError(self._records, shared.key) != <PyObject *>shared.record:
            return self._readers.enter(number, flags, unique, uid, tid)
        if PyDict_GetItemWithError(self._parked, number) == <PyObject *>opened:
            del self._parked[number]
            self._inodes[number] = opened
        elif (
            PyDict_GetItemWithError(self._inodes, number) != <PyObject *>opened or opened.writers
        ):
            return self._readers.enter(number, flags, unique, uid, tid)
        opened.readers += 1
        # As SharedHandles._count.
        self._touch(ino)
        self._note(handle, 1, unique)
        tally = shared.tally
        tally.hits += 1
        tally.loaded_bytes += shared.size_bytes
        followed = shared.followed
        if followed != self._not_followed:
            self._loaded(followed)
        if self._opened is not None:
            self._opened(number, shared.size_bytes, flags, uid, tid)
        self.native += 1
        return shared

    # As SharedHandles.leave, _may_be_parked; OpenInodes.leave_one, park.
    cdef bint _leave(self, uint64_t ino, uint64_t fh, uint64_t unique) except -1:
        """Count a close; False if others must answer."""
        cdef object number = ino
        cdef PyObject *found = PyDict_GetItemWithError(self._shared, number)
        if found is NULL:
            return self._readers.leave(number, fh, unique)
        shared = <object>found
        handle, opened = shared.handle, shared.opened
        if handle.fh != fh or not handle.opens:
            return self._readers.leave(number, fh, unique)
        cdef long readers = opened.readers, served = opened.served_readers
        if readers > 1 + served:
            opened.readers = readers - 1
        elif served or opened.gone is not None or opened.fd >= 0 or opened.writers:
            return self._readers.leave(number, fh, unique)
        elif len(self._inodes) + len(self._parked) > self._most:
            return self._readers.leave(number, fh, unique)
        else:
            opened.readers = 0
            del self._inodes[number]
            self._parked[number] = opened
        self._note(handle, -1, unique)
        self.native += 1
        return True

    # As Handles.share, leave.
    cdef int _note(self, object handle, int more, uint64_t unique) except -1:
        """Count *more* opens of *handle* in its row, too."""
        cdef Py_ssize_t slot = handle.slot
        cdef uint32_t opens = <uint32_t>handle.opens + more
        cdef uint8_t *row = <uint8_t *>self._memory.of(self._handles._memory)
        row += ROWS_START + slot * ROW_BYTES + OPENS_OFFSET
        handle.opens = opens
        (<uint64_t *>row)[0] = unique
        (<uint32_t *>(row + 8))[0] = opens
        return 0

    # As Heat.touch.
    cdef int _touch(self, uint64_t ino) except -1:
        """Note that block *ino* was used, if it is known."""
        heat = self._heat
        cdef uint32_t row = self._find(ino)
        if not row:
            return 0
        cdef uint64_t *touched = <uint64_t *>self._touched.of(heat._touched) + row
        cdef uint16_t *touches
        cdef uint32_t name_hash
        cdef uint64_t stamp = heat._stamp, before = touched[0]
        if before < <uint64_t>heat._burst_begin:
            touches = <uint16_t *>self._touches.of(heat._touches) + row
            if 0 < touches[0] < TOUCHES_MAX:
                touches[0] += 1
                name_hash = (<uint32_t *>self._name_hash.of(heat._name_hash))[row]
                policy = heat.policy
                if not <object>name_hash & policy.sample_bits:
                    policy.used(name_hash)
                if before < <uint64_t>heat._evicted_stamp:
                    heat.note_kept(row)
        touched[0] = stamp
        heat._stamp = stamp + 1
        if stamp >= <uint64_t>heat._burst_end:
            heat._begin_burst((stamp >> 20) + 1)
        return 0

    # As RowTable.find.
    cdef uint32_t _find(self, uint64_t ino) except? 0:
        """Return the row of *ino*, or 0."""
        cdef View view = <View>self._part_views[ino & (PARTS - 1)]
        cdef uint32_t *part = <uint32_t *>view.of(self._parts[ino & (PARTS - 1)])
        cdef uint64_t mask = view._buffer.len // sizeof(uint32_t) - 1
        cdef uint64_t *inos = <uint64_t *>self._ino.of(self._heat._ino)
        cdef uint64_t slot = (ino * SPREAD >> SHIFT) & mask
        cdef uint32_t row = part[slot]
        while row:
            if inos[row] == ino:
                return row
            slot = (slot + 1) & mask
            row = part[slot]
        return 0
