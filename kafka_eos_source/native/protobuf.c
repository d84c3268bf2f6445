/*
 * Converts Protobuf messages to the buffers of Arrow arrays and back, without a Python object per record.
 *
 * This is a plain shared library. It includes neither Python.h nor Arrow, and links against nothing, so building
 * it needs only a C compiler. Python compiles a descriptor to a flat program (registry/protobuf_program.py), which
 * this file executes. The functions keep no state and may run in several threads at once, without Python's GIL.
 *
 * registry/protobuf_program.py declares the structs and functions. If you change one, change
 * KAFKA_EOS_PROTOBUF_VERSION here and VERSIONS in native.py. Tests compare the decoder with Google's library.
 *
 * A frame is a set of columns with the same number of rows: those of the message itself, and those of the elements
 * of each repeated message or map. A singular message inside a message shares the frame of the outer one. A field
 * is written to its slot, the newest row of its frame, whenever it occurs, so the last occurrence wins and messages
 * that occur twice are merged, as Protobuf demands.
 *
 * A call stops before the row with which its columns would take more memory than the caller allows, or an offset
 * would not fit into an int32. The caller goes on from there with another call.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "buffers.h"

#define KAFKA_EOS_PROTOBUF_VERSION 3

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#define RARE static __attribute__((noinline, cold))
#else
#define INLINE static inline
#define RARE static
#endif

EXPORT int32_t kafka_eos_protobuf_version(void) { return KAFKA_EOS_PROTOBUF_VERSION; }

/* ---- the program --------------------------------------------------------------------------------------- */

enum {
        BOOL = 1,
        INT32,
        SINT32,
        UINT32, /* stored as int64 */
        INT64,
        SINT64,
        UINT64,
        FIXED32, /* stored as int64 */
        SFIXED32,
        FLOAT,
        FIXED64,
        SFIXED64,
        DOUBLE,
        ENUM,
        STRING,
        BYTES,
        MESSAGE,
        GROUP,
        TIMESTAMP, /* stored as microseconds */
        DURATION,  /* stored as microseconds */
        RAW,       /* a message that is stored as its bytes */
        KINDS
};

enum { REPEATED = 1, NULLABLE = 2, REQUIRED = 4, MAP = 8, CLOSED = 16, PACKED = 32, EXPLICIT = 64 };

/* How to read a field: a number, numbers, bytes or a string, another singular field, elements, entries of a map. */
enum { ONE_NUMBER, NUMBERS, TEXT, OTHER, ELEMENTS, ENTRIES, NARROWED_NUMBER, NARROWED_NUMBERS };

enum { VARINT = 0, I64 = 1, LEN = 2, START_GROUP = 3, END_GROUP = 4, I32 = 5 };

static const uint8_t wire_types[KINDS] = {
        [BOOL] = VARINT,   [INT32] = VARINT,   [SINT32] = VARINT, [UINT32] = VARINT, [INT64] = VARINT,
        [SINT64] = VARINT, [UINT64] = VARINT,  [FIXED32] = I32,   [SFIXED32] = I32,  [FLOAT] = I32,
        [FIXED64] = I64,   [SFIXED64] = I64,   [DOUBLE] = I64,    [ENUM] = VARINT,   [STRING] = LEN,
        [BYTES] = LEN,     [MESSAGE] = LEN,    [GROUP] = START_GROUP, [TIMESTAMP] = LEN, [DURATION] = LEN,
        [RAW] = LEN};

/* Bytes of a stored value; 0 = of variable size, or a message. */
static const uint8_t widths[KINDS] = {
        [BOOL] = 1,    [INT32] = 4,    [SINT32] = 4, [UINT32] = 8, [INT64] = 8,     [SINT64] = 8, [UINT64] = 8,
        [FIXED32] = 8, [SFIXED32] = 4, [FLOAT] = 4,  [FIXED64] = 8, [SFIXED64] = 8, [DOUBLE] = 8, [ENUM] = 4,
        [TIMESTAMP] = 8, [DURATION] = 8};

typedef struct {
        int32_t number, kind, flags;
        int32_t frame;                       /* the frame that contains its slots */
        int32_t message;                     /* of a message: index in `messages` */
        int32_t elements;                    /* of a repeated message or a map: frame of the elements */
        int32_t oneof;                       /* index, or -1 */
        int32_t parent;                      /* the field of the enclosing message if that shares the frame, or -1 */
        int32_t known_first, known_count;    /* of a closed enum: its numbers, ascending, in `known` */
        int32_t default_first, default_bytes; /* a default that is not zero: bytes in `constants`; -1 = zero */
        int32_t extra_bytes;                  /* memory that Python needs for each value, beyond that of this file */
        int32_t tag;                          /* the first bytes of the field, as a number; packed if it is declared so */
        int32_t reader;                       /* how to read it */
} field_t;

typedef struct {
        int32_t first, count;            /* fields, ascending by number */
        int32_t dense, dense_count;      /* `dense[dense + number]` = field, or -1 */
        int32_t owner;                   /* the field of which this is the type, or -1 */
        int32_t oneof_first, oneof_count;
} message_t;

typedef struct {
        int32_t first, count;                  /* of `members`: fields with slots in this frame */
        int32_t closer_first, closer_count;    /* of `members`: those that need work when a row is complete */
        int32_t default_first, default_count;  /* of `members`: those with a default that is not zero */
        int32_t key;                           /* of the elements of a map: the field with the key, or -1 */
        int32_t row_bytes;                     /* memory of one row, without data of variable size */
        int32_t extra_bytes;                   /* the same, of what Python needs in addition */
} frame_t;

typedef struct {
        const field_t *fields;
        const message_t *messages;
        const frame_t *frames;
        const int32_t *members;
        const int32_t *dense;
        const int32_t *known;
        const uint8_t *constants;
        int32_t field_count, message_count, frame_count, oneof_count;
} program_t;

enum {
        E_TRUNCATED = 1,
        E_VARINT,
        E_TAG,
        E_END_GROUP,
        E_DEPTH,
        E_UTF8,
        E_TIMESTAMP,
        E_DURATION,
        E_REQUIRED,
        E_START = 11,
        E_NULL_ELEMENT,
        E_ONEOF,
        E_RANGE,
        E_MEMORY,
        E_STOP /* the call ends before this row */
};

enum { MAX_DEPTH = 100, FIRST_BYTES = 16 << 20 };

/* ---- memory -------------------------------------------------------------------------------------------- */

/* Makes a buffer `bytes` long, of which what is new is zero. */
static int extend(part_t *part, int64_t bytes, allowance_t *allowance) {
        if (bytes <= part->bytes)
                return 1;
        if (!reserve_within(part, bytes - part->bytes, allowance))
                return 0;
        memset(part->at + part->bytes, 0, (size_t)(bytes - part->bytes));
        part->bytes = bytes;
        return 1;
}

/* ---- what a decoder fills ------------------------------------------------------------------------------ */

typedef struct {
        part_t validity;      /* nullable fields that are not repeated: a byte per slot */
        part_t values;        /* of fixed width: one per slot, or one per element */
        part_t offsets;       /* repeated, or of variable size: int32 per slot, and one more */
        part_t entry_offsets; /* repeated and of variable size: int32 per element, and one more */
        part_t data;          /* bytes of values of variable size */
        part_t dropped;       /* maps: int32 indexes of entries whose key occurs again later */
        int64_t elements;     /* repeated, but not messages: how many */
        int64_t filled;       /* singular and of variable size: slots whose offsets are complete */
        int64_t seconds, slot; /* a timestamp or duration that is not complete yet, and the slot to which it belongs */
        int32_t nanos;
        int32_t unused;
} column_t;

typedef struct {
        int64_t row;
        int32_t code, field;
        int64_t detail;
} error_t;

typedef struct {
        int64_t rows, capacity;
} rows_t;

typedef struct {
        int32_t case_field; /* the member that is set */
        int32_t unused;
        int64_t slot; /* in this slot */
} oneof_t;

/* What kafka_eos_protobuf_decode returns. native.Decoded has the same layout up to `rows`. */
typedef struct {
        column_t *columns;
        rows_t *frames;
        part_t validity; /* a byte per message */
        part_t errors;   /* error_t */
        int64_t no_memory;
        int64_t rows; /* messages that were decoded; fewer than given if the columns became too large */
        oneof_t *oneofs;
        const program_t *program;
        int64_t messages;
        allowance_t allowance;
        int64_t detail;
        int32_t code, field;
        int32_t unknown; /* whether the message that is being read has unknown fields */
        int32_t ended_with_unknown; /* the same of the message that was complete last */
} decoded_t;

#define OFFSETS(part) ((int32_t *)(void *)(part).at)

RARE void set_error(decoded_t *d, int32_t code, int32_t field, int64_t detail) {
        d->code   = code;
        d->field  = field;
        d->detail = detail;
}

/* Returns 0, which the compiler can see at each call. */
INLINE int fail(decoded_t *d, int32_t code, int32_t field, int64_t detail) {
        set_error(d, code, field, detail);
        return 0;
}

/* Fails because a buffer cannot grow: memory ran out, or the call has used all that it may. */
RARE void set_no_room(decoded_t *d) {
        if (!d->allowance.is_exceeded)
                d->no_memory = 1;
        set_error(d, d->allowance.is_exceeded ? E_STOP : E_MEMORY, -1, 0);
}

INLINE int no_room(decoded_t *d) {
        set_no_room(d);
        return 0;
}

/* Fails because an offset would not fit into an int32. */
INLINE int too_large(decoded_t *d) { return fail(d, E_STOP, -1, 0); }

static int grow_frame(decoded_t *d, int32_t index) {
        const program_t *p = d->program;
        const frame_t *f   = &p->frames[index];
        rows_t *rows       = &d->frames[index];
        int64_t capacity   = rows->capacity ? rows->capacity * 2 : 64;
        int32_t i;

        if (!rows->capacity && !index) { /* usually, all messages are decoded */
                capacity = d->messages;
                while (capacity > 64 && capacity * (f->row_bytes + f->extra_bytes) > FIRST_BYTES)
                        capacity /= 2;
        }
        if (rows->rows >= KAFKA_EOS_LARGEST_OFFSET)
                return too_large(d);
        if (!charge(&d->allowance, (capacity - rows->capacity) * f->extra_bytes))
                return no_room(d);
        for (i = 0; i < f->count; i++) {
                int32_t member        = p->members[f->first + i];
                const field_t *field  = &p->fields[member];
                column_t *column      = &d->columns[member];
                int repeated          = field->flags & REPEATED;
                int64_t width         = widths[field->kind];
                int variable          = field->kind == STRING || field->kind == BYTES || field->kind == RAW;
                if (field->flags & NULLABLE && !repeated && !extend(&column->validity, capacity, &d->allowance))
                        return no_room(d);
                if (width && !repeated && !extend(&column->values, capacity * width, &d->allowance))
                        return no_room(d);
                if ((repeated || variable) && !extend(&column->offsets, (capacity + 1) * 4, &d->allowance))
                        return no_room(d);
        }
        rows->capacity = capacity;
        return 1;
}

/* Returns the elements of a repeated field so far. */
static int64_t count_elements(const decoded_t *d, int32_t member) {
        const field_t *field = &d->program->fields[member];
        return field->elements >= 0 ? d->frames[field->elements].rows : d->columns[member].elements;
}

enum { WORDS = 16 };

/*
 * Appends to the bytes of values of variable size. Short values are copied as two words, without a loop or a call:
 * `readable` says how many bytes may be read at `from`, and the bytes behind those of the value do not count.
 */
INLINE int append_data(decoded_t *d, column_t *column, const uint8_t *from, int64_t bytes, int64_t readable) {
        part_t *data = &column->data;

        if (bytes > KAFKA_EOS_LARGEST_OFFSET - data->bytes)
                return too_large(d);
        if (bytes <= WORDS && readable >= WORDS && WORDS <= data->capacity - data->bytes)
                memcpy(data->at + data->bytes, from, WORDS);
        else if (!reserve_within(data, bytes, &d->allowance))
                return no_room(d);
        else if (bytes)
                memcpy(data->at + data->bytes, from, (size_t)bytes);
        data->bytes += bytes;
        return 1;
}

/* Writes the offsets of slots before `slot` in which the field does not occur. */
INLINE void fill_offsets(column_t *column, int64_t slot) {
        int32_t *offsets = OFFSETS(column->offsets), end = (int32_t)column->data.bytes;

        while (column->filled < slot)
                offsets[++column->filled] = end;
}

/* Takes back what was written to a slot and those behind it. */
INLINE void take_back(column_t *column, int64_t slot) {
        if (column->filled <= slot)
                return;
        column->data.bytes = OFFSETS(column->offsets)[slot];
        column->filled     = slot;
}

/* Ends the value of a slot. */
INLINE void end_value(column_t *column, int64_t slot) {
        OFFSETS(column->offsets)[slot + 1] = (int32_t)column->data.bytes;
        column->filled                     = slot + 1;
}

/* Returns whether a string is UTF-8. `readable` as in `append_data`. */
INLINE int is_text(const uint8_t *at, int64_t bytes, int64_t readable) {
        uint64_t words[2];

        if (bytes > WORDS || readable < WORDS)
                return is_utf8(at, bytes);
        memcpy(words, at, WORDS);
        if (bytes <= 8) {
                words[0] &= bytes == 8 ? UINT64_MAX : (UINT64_C(1) << 8 * bytes) - 1;
                words[1] = 0;
        } else if (bytes < WORDS) {
                words[1] &= (UINT64_C(1) << 8 * (bytes - 8)) - 1;
        }
        return !((words[0] | words[1]) & UINT64_C(0x8080808080808080)) || is_utf8(at, bytes);
}

/* Writes the default to a slot; defaults of zero are there already. */
static int write_default(decoded_t *d, int32_t member, int64_t slot) {
        const field_t *field = &d->program->fields[member];
        const uint8_t *from  = d->program->constants + field->default_first;
        column_t *column     = &d->columns[member];

        if (widths[field->kind]) {
                memcpy(column->values.at + slot * widths[field->kind], from, widths[field->kind]);
                return 1;
        }
        fill_offsets(column, slot);
        if (!append_data(d, column, from, field->default_bytes, 0))
                return 0;
        end_value(column, slot);
        return 1;
}

/* Begins a row. Returns its slot; -1 on an error. */
static int64_t open_row(decoded_t *d, int32_t index) {
        const frame_t *f = &d->program->frames[index];
        rows_t *rows     = &d->frames[index];
        int64_t slot     = rows->rows;
        int32_t i;

        if (slot >= rows->capacity && !grow_frame(d, index))
                return -1;
        rows->rows++;
        for (i = 0; i < f->default_count; i++)
                if (!write_default(d, d->program->members[f->default_first + i], slot))
                        return -1;
        return slot;
}

static void truncate_frame(decoded_t *d, int32_t index, int64_t to);

/* Shortens a column with offsets to what it was before `slot` began. */
static void truncate_column(decoded_t *d, int32_t member, int64_t slot) {
        const field_t *field = &d->program->fields[member];
        column_t *column     = &d->columns[member];
        int32_t to;

        if (!(field->flags & REPEATED)) {
                take_back(column, slot);
                return;
        }
        to = OFFSETS(column->offsets)[slot];
        if (field->elements >= 0) {
                truncate_frame(d, field->elements, to);
                while (column->dropped.bytes && OFFSETS(column->dropped)[column->dropped.bytes / 4 - 1] >= to)
                        column->dropped.bytes -= 4;
        } else {
                column->elements = to;
                if (widths[field->kind])
                        column->values.bytes = (int64_t)to * widths[field->kind];
                else
                        column->data.bytes = column->entry_offsets.bytes ? OFFSETS(column->entry_offsets)[to] : 0;
                if (column->entry_offsets.bytes)
                        column->entry_offsets.bytes = ((int64_t)to + 1) * 4;
        }
}

/* Removes all rows of a frame from `to` on. */
static void truncate_frame(decoded_t *d, int32_t index, int64_t to) {
        const program_t *p = d->program;
        const frame_t *f   = &p->frames[index];
        rows_t *rows       = &d->frames[index];
        int32_t i;

        if (rows->rows <= to)
                return;
        for (i = 0; i < f->count; i++) {
                int32_t member       = p->members[f->first + i];
                const field_t *field = &p->fields[member];
                column_t *column     = &d->columns[member];
                int64_t width        = widths[field->kind];

                column->slot = -1;
                if (column->offsets.at)
                        truncate_column(d, member, to);
                if (column->validity.at)
                        memset(column->validity.at + to, 0, (size_t)(rows->rows - to));
                if (width && !(field->flags & REPEATED))
                        memset(column->values.at + to * width, 0, (size_t)((rows->rows - to) * width));
        }
        rows->rows = to;
}

/* Makes a field, with all that is inside it, what it was when the slot began. */
static int reset(decoded_t *d, int32_t member, int64_t slot) {
        const program_t *p   = d->program;
        const field_t *field = &p->fields[member];
        column_t *column     = &d->columns[member];
        int64_t width        = widths[field->kind];

        column->slot = -1;
        if (column->offsets.at)
                truncate_column(d, member, slot);
        if (field->flags & REPEATED)
                return 1;
        if (column->validity.at)
                column->validity.at[slot] = 0;
        if (width)
                memset(column->values.at + slot * width, 0, (size_t)width);
        if (field->kind == MESSAGE || field->kind == GROUP) {
                const message_t *m = &p->messages[field->message];
                int32_t i;
                for (i = 0; i < m->count; i++)
                        if (!reset(d, m->first + i, slot))
                                return 0;
                for (i = 0; i < m->oneof_count; i++)
                        d->oneofs[m->oneof_first + i].slot = -1;
        }
        return field->default_bytes < 0 || write_default(d, member, slot);
}

/* ---- duplicate keys of maps ---------------------------------------------------------------------------- */

typedef struct {
        const column_t *column;
        int64_t width; /* 0 = strings */
} keys_t;

static int compare_keys(const keys_t *keys, int32_t left, int32_t right) {
        const column_t *c = keys->column;
        const int32_t *offsets;
        int64_t lefts, rights;
        int order;

        if (keys->width)
                return memcmp(c->values.at + left * keys->width, c->values.at + right * keys->width,
                              (size_t)keys->width);
        offsets = OFFSETS(c->offsets);
        lefts   = offsets[left + 1] - offsets[left];
        rights  = offsets[right + 1] - offsets[right];
        if (lefts != rights)
                return lefts < rights ? -1 : 1;
        order = lefts ? memcmp(c->data.at + offsets[left], c->data.at + offsets[right], (size_t)lefts) : 0;
        return order;
}

/* Orders entries by key, and those of the same key by position. */
static int entry_before(const keys_t *keys, int32_t left, int32_t right) {
        int order = compare_keys(keys, left, right);
        return order ? order < 0 : left < right;
}

static void sift(const keys_t *keys, int32_t *heap, int64_t root, int64_t count) {
        for (;;) {
                int64_t child = 2 * root + 1;
                int32_t swap;
                if (child >= count)
                        return;
                if (child + 1 < count && entry_before(keys, heap[child], heap[child + 1]))
                        child++;
                if (!entry_before(keys, heap[root], heap[child]))
                        return;
                swap = heap[root], heap[root] = heap[child], heap[child] = swap;
                root = child;
        }
}

/* Records the entries of one map whose key occurs again later. Heapsort, because keys may be hostile. */
static int drop_duplicates(decoded_t *d, int32_t member, int32_t from, int32_t to) {
        const field_t *field = &d->program->fields[member];
        int32_t key          = d->program->frames[field->elements].key;
        keys_t keys          = {&d->columns[key], widths[d->program->fields[key].kind]};
        part_t *dropped      = &d->columns[member].dropped;
        int64_t count        = (int64_t)to - from, i;
        int32_t j, k, *heap, swap;
        int found = 1;

        if (!keys.width)
                fill_offsets(&d->columns[key], to);
        if (count <= 16) {
                for (j = from; j < to; j++)
                        for (k = j + 1; k < to; k++)
                                if (!compare_keys(&keys, j, k)) {
                                        if (!append_within(dropped, &j, 4, &d->allowance))
                                                return no_room(d);
                                        break;
                                }
                return 1;
        }
        heap = malloc((size_t)count * sizeof(*heap));
        if (!heap)
                return no_room(d);
        for (i = 0; i < count; i++)
                heap[i] = from + (int32_t)i;
        for (i = count / 2 - 1; i >= 0; i--)
                sift(&keys, heap, i, count);
        for (i = count - 1; i > 0; i--) {
                swap = heap[0], heap[0] = heap[i], heap[i] = swap;
                sift(&keys, heap, 0, i);
        }
        for (i = 0; found && i + 1 < count; i++)
                if (!compare_keys(&keys, heap[i], heap[i + 1]))
                        found = append_within(dropped, &heap[i], 4, &d->allowance);
        free(heap);
        return found || no_room(d);
}

/* ---- times --------------------------------------------------------------------------------------------- */

/* Converts a Timestamp or a Duration to microseconds. Returns 0 if Protobuf does not allow the value. */
static int to_micros(int32_t kind, int64_t seconds, int32_t nanos, int64_t *micros) {
        if (kind == TIMESTAMP) {
                if (seconds < -62135596800LL || seconds > 253402300799LL || nanos < 0 || nanos > 999999999)
                        return 0;
        } else if (seconds < -315576000000LL || seconds > 315576000000LL || nanos < -999999999 ||
                   nanos > 999999999 || (seconds > 0 && nanos < 0) || (seconds < 0 && nanos > 0)) {
                return 0;
        }
        *micros = seconds * 1000000 + nanos / 1000;
        return 1;
}

static int fail_time(decoded_t *d, int32_t member, int64_t seconds) {
        return fail(d, d->program->fields[member].kind == TIMESTAMP ? E_TIMESTAMP : E_DURATION, member, seconds);
}

/* ---- rows ---------------------------------------------------------------------------------------------- */

static int is_present(const decoded_t *d, int32_t member, int64_t slot) {
        return member < 0 || !d->columns[member].validity.at || d->columns[member].validity.at[slot];
}

/* Ends a row: writes offsets, and checks what can only be checked when all occurrences are known. */
static int close_row(decoded_t *d, int32_t index, int64_t slot, int checked) {
        const program_t *p = d->program;
        const frame_t *f   = &p->frames[index];
        int32_t i;

        for (i = 0; i < f->closer_count; i++) {
                int32_t member       = p->members[f->closer_first + i];
                const field_t *field = &p->fields[member];
                column_t *column     = &d->columns[member];

                if (field->flags & REPEATED) {
                        int32_t *offsets = OFFSETS(column->offsets);
                        int64_t end      = count_elements(d, member);
                        if (end > KAFKA_EOS_LARGEST_OFFSET)
                                return too_large(d);
                        offsets[slot + 1] = (int32_t)end;
                        if (field->flags & MAP && end - offsets[slot] > 1 &&
                            !drop_duplicates(d, member, offsets[slot], (int32_t)end))
                                return 0;
                } else if ((field->kind == TIMESTAMP || field->kind == DURATION) && column->slot == slot) {
                        int64_t *micros = (int64_t *)(void *)column->values.at + slot;
                        if (!to_micros(field->kind, column->seconds, column->nanos, micros))
                                return fail_time(d, member, column->seconds);
                }
                if (checked && field->flags & REQUIRED && !column->validity.at[slot] &&
                    is_present(d, field->parent, slot))
                        return fail(d, E_REQUIRED, member, 0);
        }
        return 1;
}

/* ---- the wire format ----------------------------------------------------------------------------------- */

static int read_long_varint(decoded_t *d, const uint8_t **at, const uint8_t *end, int32_t member, uint64_t *value) {
        const uint8_t *from = *at;
        uint64_t result     = 0;
        int shift;

        for (shift = 0; shift < 70; shift += 7) {
                uint8_t byte;
                if (from >= end)
                        return fail(d, E_TRUNCATED, member, 0);
                byte = *from++;
                result |= (uint64_t)(byte & 0x7F) << shift; /* like Google's libraries, ignores bits beyond 64 */
                if (byte < 0x80) {
                        *value = result;
                        *at    = from;
                        return 1;
                }
        }
        return fail(d, E_VARINT, member, 0);
}

INLINE int read_varint(decoded_t *d, const uint8_t **at, const uint8_t *end, int32_t member, uint64_t *value) {
        const uint8_t *from = *at;

        int read;

        if (from < end && *from < 0x80) {
                *value = *from;
                *at    = from + 1;
                return 1;
        }
        read = read_long_varint(d, &from, end, member, value);
        *at  = from;
        return read;
}

static int read_any_tag(decoded_t *d, const uint8_t **at, const uint8_t *end, int32_t member, uint32_t *tag) {
        const uint8_t *from = *at;
        uint64_t value;

        if (!read_varint(d, at, end, member, &value))
                return 0;
        if (value > UINT32_MAX || *at - from > 5)
                return fail(d, E_TAG, member, 0);
        *tag = (uint32_t)value;
        return 1;
}

INLINE int read_tag(decoded_t *d, const uint8_t **at, const uint8_t *end, int32_t member, uint32_t *tag) {
        const uint8_t *from = *at;
        int read;

        if (from < end && *from < 0x80 && *from >> 3) {
                *tag = *from;
                *at  = from + 1;
                return 1;
        }
        read = read_any_tag(d, &from, end, member, tag);
        *at  = from;
        return read && (*tag >> 3 || fail(d, E_TAG, member, 0));
}

INLINE int read_bytes(decoded_t *d, const uint8_t **at, const uint8_t *end, int32_t member, uint64_t *bytes) {
        if (!read_varint(d, at, end, member, bytes))
                return 0;
        return *bytes <= (uint64_t)(end - *at) || fail(d, E_TRUNCATED, member, 0);
}

/* Skips a field whose tag was read. */
static int skip(decoded_t *d, const uint8_t **at, const uint8_t *end, uint32_t tag, int depth, int32_t member) {
        uint64_t bytes;
        uint32_t inner;

        switch (tag & 7) {
        case VARINT:
                return read_varint(d, at, end, member, &bytes);
        case I64:
        case I32:
                bytes = (tag & 7) == I64 ? 8 : 4;
                if ((uint64_t)(end - *at) < bytes)
                        return fail(d, E_TRUNCATED, member, 0);
                *at += bytes;
                return 1;
        case LEN:
                if (!read_bytes(d, at, end, member, &bytes))
                        return 0;
                *at += bytes;
                return 1;
        case START_GROUP:
                if (depth >= MAX_DEPTH)
                        return fail(d, E_DEPTH, member, depth);
                for (;;) {
                        if (!read_any_tag(d, at, end, member, &inner)) /* like Google's, accepts field 0 here */
                                return 0;
                        if ((inner & 7) == END_GROUP)
                                return inner >> 3 == tag >> 3 || fail(d, E_END_GROUP, member, inner >> 3);
                        if (!skip(d, at, end, inner, depth + 1, member))
                                return 0;
                }
        case END_GROUP:
                return fail(d, E_END_GROUP, member, tag >> 3);
        default:
                return fail(d, E_TAG, member, tag);
        }
}

/* Reads a number, and returns its bits as they are stored. */
INLINE int read_number(decoded_t *d, const uint8_t **at, const uint8_t *end, int32_t member, int32_t kind,
                       uint64_t *bits) {
        uint32_t word;

        switch (wire_types[kind]) {
        case VARINT:
                if (!read_varint(d, at, end, member, bits))
                        return 0;
                break;
        case I64:
                if (end - *at < 8)
                        return fail(d, E_TRUNCATED, member, 0);
                memcpy(bits, *at, 8);
                *at += 8;
                return 1;
        default:
                if (end - *at < 4)
                        return fail(d, E_TRUNCATED, member, 0);
                memcpy(&word, *at, 4);
                *bits = word;
                *at += 4;
                return 1;
        }
        switch (kind) {
        case BOOL:
                *bits = *bits != 0;
                break;
        case SINT32:
                word  = (uint32_t)*bits;
                *bits = (word >> 1) ^ (0u - (word & 1));
                break;
        case SINT64:
                *bits = (*bits >> 1) ^ (0ULL - (*bits & 1));
                break;
        case UINT32:
                *bits &= 0xFFFFFFFFu;
                break;
        }
        return 1;
}

/* Returns whether a closed enum has the number. Protobuf treats other numbers as unknown fields. */
static int is_known(const program_t *p, const field_t *field, uint64_t bits) {
        int32_t value = (int32_t)(uint32_t)bits, low = 0, high = field->known_count;
        const int32_t *known = p->known + field->known_first;

        while (low < high) {
                int32_t middle = low + (high - low) / 2;
                if (known[middle] < value)
                        low = middle + 1;
                else
                        high = middle;
        }
        return low < field->known_count && known[low] == value;
}

/* Returns whether a well-formed number, which may be of another type of this encoding, has a value of this type. */
KAFKA_EOS_COLD static int is_kept(const uint8_t *at, int32_t kind) {
        uint64_t raw = 0;
        uint32_t word;
        int shift = 0;

        switch (wire_types[kind]) {
        case VARINT:
                for (; *at & 0x80; at++, shift += 7)
                        raw |= (uint64_t)(*at & 0x7F) << shift;
                raw |= (uint64_t)*at << shift;
                break;
        case I32:
                memcpy(&word, at, 4);
                raw = word;
                break;
        default:
                memcpy(&raw, at, 8);
        }
        switch (kind) {
        case BOOL:
                return raw <= 1;
        case INT32:
        case ENUM:
                return (uint64_t)(int64_t)(int32_t)(uint32_t)raw == raw;
        case SINT32:
        case UINT32:
                return raw <= UINT32_MAX;
        case FIXED32:
        case SFIXED32:
                return raw <= INT32_MAX;
        default:
                return raw <= INT64_MAX;
        }
}

/* Looks at the numbers that come next. Returns whether all have a value of their field's type. */
KAFKA_EOS_COLD static int are_kept(decoded_t *d, int32_t member, const uint8_t *at, const uint8_t *end, int packed) {
        int32_t kind = d->program->fields[member].kind;
        uint64_t bits;

        if (packed) {
                if (!read_bytes(d, &at, end, member, &bits))
                        return 0;
                end = at + bits;
        }
        while (at < end || !packed) {
                const uint8_t *begin = at;
                if (!read_number(d, &at, end, member, kind, &bits))
                        return 0;
                if (!is_kept(begin, kind))
                        return fail(d, E_RANGE, member, 0);
                if (!packed)
                        break;
        }
        return 1;
}

/* Stores the lowest 1, 4 or 8 bytes of a number. */
INLINE void store(uint8_t *to, uint64_t bits, int width) {
        if (width == 8)
                memcpy(to, &bits, 8);
        else if (width == 4)
                memcpy(to, &bits, 4);
        else
                *to = (uint8_t)bits;
}

/* Makes room for more elements of a repeated number, with what Python needs for them. */
static int grow_elements(decoded_t *d, int32_t member, int width) {
        part_t *values  = &d->columns[member].values;
        int64_t before  = values->capacity;
        int64_t extra   = d->program->fields[member].extra_bytes;

        if (!grow(values, width, &d->allowance))
                return no_room(d);
        return charge(&d->allowance, (values->capacity - before) / width * extra) || no_room(d);
}

INLINE int append_number(decoded_t *d, int32_t member, uint64_t bits, int width) {
        column_t *column = &d->columns[member];
        if (width > column->values.capacity - column->values.bytes && !grow_elements(d, member, width))
                return 0;
        store(column->values.at + column->values.bytes, bits, width);
        column->values.bytes += width;
        column->elements++;
        return 1;
}

/* Reads the seconds and nanos of a Timestamp or a Duration. */
static int read_time(decoded_t *d, const uint8_t *at, const uint8_t *end, int32_t member, int depth, int64_t *seconds,
                     int32_t *nanos) {
        while (at < end) {
                uint32_t tag;
                uint64_t value;
                if (!read_tag(d, &at, end, member, &tag))
                        return 0;
                if (tag == (1 << 3 | VARINT) || tag == (2 << 3 | VARINT)) {
                        if (!read_varint(d, &at, end, member, &value))
                                return 0;
                        if (tag >> 3 == 1)
                                *seconds = (int64_t)value;
                        else
                                *nanos = (int32_t)(uint32_t)value;
                } else if (!skip(d, &at, end, tag, depth, member)) {
                        return 0;
                }
        }
        return 1;
}

/* Says that a member of a oneof is set, which unsets the one that was. */
static int set_oneof(decoded_t *d, int32_t member, int64_t slot) {
        oneof_t *oneof = &d->oneofs[d->program->fields[member].oneof];
        if (oneof->slot == slot && oneof->case_field != member && !reset(d, oneof->case_field, slot))
                return 0;
        oneof->slot       = slot;
        oneof->case_field = member;
        return 1;
}

static int parse(decoded_t *d, int32_t message, int64_t slot, const uint8_t **at, const uint8_t *end, uint32_t group,
                 int depth);

/* Reads one occurrence of a repeated field that is not packed, or of any element that is not a number. */
static int read_element(decoded_t *d, int32_t member, const uint8_t **at, const uint8_t *end, int depth) {
        const field_t *field = &d->program->fields[member];
        column_t *column     = &d->columns[member];
        const uint8_t *stop  = end;
        uint64_t bytes       = 0;
        int64_t slot, micros, seconds = 0;
        int32_t nanos = 0, offset;

        if (field->kind != GROUP) {
                if (!read_bytes(d, at, end, member, &bytes))
                        return 0;
                stop = *at + bytes;
        }
        switch (field->kind) {
        case MESSAGE:
        case GROUP:
                if (depth >= MAX_DEPTH)
                        return fail(d, E_DEPTH, member, depth);
                slot = open_row(d, field->elements);
                return slot >= 0 &&
                       parse(d, field->message, slot, at, stop, field->kind == GROUP ? (uint32_t)field->number : 0,
                             depth + 1) &&
                       close_row(d, field->elements, slot, 1);
        case TIMESTAMP:
        case DURATION:
                if (!read_time(d, *at, stop, member, depth + 1, &seconds, &nanos))
                        return 0;
                *at = stop;
                if (!to_micros(field->kind, seconds, nanos, &micros))
                        return fail_time(d, member, seconds);
                return append_number(d, member, (uint64_t)micros, 8);
        default:
                if (field->kind == STRING && !is_text(*at, (int64_t)bytes, end - *at))
                        return fail(d, E_UTF8, member, 0);
                if (!column->entry_offsets.bytes && !extend(&column->entry_offsets, 4, &d->allowance))
                        return no_room(d);
                if (!append_data(d, column, *at, (int64_t)bytes, end - *at))
                        return 0;
                offset = (int32_t)column->data.bytes;
                if (!append_within(&column->entry_offsets, &offset, 4, &d->allowance))
                        return no_room(d);
                column->elements++;
                *at = stop;
                return 1;
        }
}

/* Says that a field occurs in a slot. */
INLINE int occurs(decoded_t *d, const field_t *field, column_t *column, int32_t member, int64_t slot) {
        if (field->oneof >= 0 && !set_oneof(d, member, slot))
                return 0;
        if (column->validity.at)
                column->validity.at[slot] = 1;
        return 1;
}

/* Reads one occurrence of a string, bytes, or a message that is stored as its bytes; not repeated. */
INLINE int read_text(decoded_t *d, const field_t *field, int32_t member, int64_t slot, const uint8_t **at,
                     const uint8_t *end) {
        column_t *column = &d->columns[member];
        uint64_t bytes   = 0;

        if (!read_bytes(d, at, end, member, &bytes) || !occurs(d, field, column, member, slot))
                return 0;
        if (field->kind == STRING && !is_text(*at, (int64_t)bytes, end - *at))
                return fail(d, E_UTF8, member, 0);
        if (field->kind != RAW) /* messages that occur twice are merged, which is what concatenation means */
                take_back(column, slot);
        fill_offsets(column, slot);
        if (!append_data(d, column, *at, (int64_t)bytes, end - *at))
                return 0;
        end_value(column, slot);
        *at += bytes;
        return 1;
}

/* Reads one occurrence of a message, a group or a time that is not repeated. */
static int read_single(decoded_t *d, int32_t member, int64_t slot, const uint8_t **at, const uint8_t *end, int depth) {
        const field_t *field = &d->program->fields[member];
        column_t *column     = &d->columns[member];
        const uint8_t *stop  = end;
        uint64_t bytes       = 0;

        if (field->kind != GROUP) {
                if (!read_bytes(d, at, end, member, &bytes))
                        return 0;
                stop = *at + bytes;
        }
        if (!occurs(d, field, column, member, slot))
                return 0;
        if (field->kind == MESSAGE || field->kind == GROUP) {
                if (depth >= MAX_DEPTH)
                        return fail(d, E_DEPTH, member, depth);
                return parse(d, field->message, slot, at, stop, field->kind == GROUP ? (uint32_t)field->number : 0,
                             depth + 1);
        }
        if (column->slot != slot) {
                column->slot    = slot;
                column->seconds = 0;
                column->nanos   = 0;
        }
        if (!read_time(d, *at, stop, member, depth + 1, &column->seconds, &column->nanos))
                return 0;
        *at = stop;
        return 1;
}

/* Reads one occurrence of a number. */
INLINE int read_single_number(decoded_t *d, const field_t *field, int32_t member, int64_t slot, const uint8_t **at,
                              const uint8_t *end) {
        column_t *column     = &d->columns[member];
        int width            = widths[field->kind];
        uint64_t bits = 0;

        if (!read_number(d, at, end, member, field->kind, &bits))
                return 0;
        if (field->flags & CLOSED && !is_known(d->program, field, bits)) {
                d->unknown = 1;
                return 1;
        }
        if (!occurs(d, field, column, member, slot))
                return 0;
        store(column->values.at + slot * width, bits, width);
        return 1;
}

static int read_repeated_number(decoded_t *d, int32_t member, const uint8_t **at, const uint8_t *end, int packed) {
        const field_t *field = &d->program->fields[member];
        const uint8_t *stop  = end;
        int width            = widths[field->kind];
        uint64_t bits = 0;

        if (packed) {
                if (!read_bytes(d, at, end, member, &bits))
                        return 0;
                stop = *at + bits;
                if ((wire_types[field->kind] == I64 && bits % 8) || (wire_types[field->kind] == I32 && bits % 4))
                        return fail(d, E_TRUNCATED, member, 0);
        }
        while (*at < stop || !packed) {
                if (!read_number(d, at, stop, member, field->kind, &bits))
                        return 0;
                if ((!(field->flags & CLOSED) || is_known(d->program, field, bits)) &&
                    !append_number(d, member, bits, width))
                        return 0;
                if (!packed)
                        break;
        }
        return 1;
}

/*
 * Reads an entry of a map. An entry with an unknown field, which includes a number that its closed enum does not
 * have, is itself an unknown field for Google's libraries.
 */
static int read_entry(decoded_t *d, int32_t member, const uint8_t **at, const uint8_t *end, int depth) {
        int32_t frame  = d->program->fields[member].elements;
        int64_t before = d->frames[frame].rows;

        if (!read_element(d, member, at, end, depth))
                return 0;
        if (d->ended_with_unknown)
                truncate_frame(d, frame, before);
        return 1;
}

/* Skips a field that the program does not have, or not with this wire type. */
static int skip_unknown(decoded_t *d, const uint8_t **at, const uint8_t *end, uint32_t tag, int depth, int32_t owner) {
        d->unknown = 1;
        return skip(d, at, end, tag, depth, owner);
}

INLINE int32_t find(const program_t *p, const message_t *m, uint32_t number) {
        int32_t low = 0, high = m->count;

        if (number < (uint32_t)m->dense_count)
                return p->dense[m->dense + (int32_t)number];
        while (low < high) {
                int32_t middle = low + (high - low) / 2;
                if ((uint32_t)p->fields[m->first + middle].number < number)
                        low = middle + 1;
                else
                        high = middle;
        }
        return low < m->count && (uint32_t)p->fields[m->first + low].number == number ? m->first + low : -1;
}

/* Reads a field that is not what the tables expect: of another wire type, or not in the tables at all. */
static int read_unexpected(decoded_t *d, int32_t member, const uint8_t **at, const uint8_t *end, uint32_t tag, int depth,
                           int32_t owner) {
        const field_t *field = member < 0 ? NULL : &d->program->fields[member];

        if (field && field->reader == NARROWED_NUMBERS && ((tag & 7) == LEN || (tag & 7) == wire_types[field->kind]))
                return are_kept(d, member, *at, end, (tag & 7) == LEN) &&
                       read_repeated_number(d, member, at, end, (tag & 7) == LEN);
        if (field && field->reader == NUMBERS && ((tag & 7) == LEN || (tag & 7) == wire_types[field->kind]))
                return read_repeated_number(d, member, at, end, (tag & 7) == LEN);
        return skip_unknown(d, at, end, tag, depth, owner);
}

/*
 * Reads the fields of a message up to `end`, or up to the end of its group.
 *
 * Writers write fields in the order of their numbers. So the next field is guessed from the last one, and its tag
 * is only compared. The processor goes on with the guess meanwhile, instead of waiting for the tables.
 */
static int parse_fields(decoded_t *d, int32_t message, int64_t slot, const uint8_t **position, const uint8_t *end,
                        uint32_t group, int depth) {
        const program_t *p   = d->program;
        const message_t *m   = &p->messages[message];
        const field_t *first = p->fields + m->first, *past = first + m->count, *field = first;
        const uint8_t *at    = *position, *inner;

        while (at < end) {
                uint32_t tag;
                int32_t member;
                int read;

                if (!read_tag(d, &at, end, m->owner, &tag))
                        return 0;
                if (field >= past || (uint32_t)field->tag != tag) {
                        if (field + 1 < past && (uint32_t)field[1].tag == tag) {
                                field++;
                        } else {
                                if ((tag & 7) == END_GROUP) {
                                        *position = at;
                                        return (group && tag >> 3 == group) ||
                                               fail(d, E_END_GROUP, m->owner, tag >> 3);
                                }
                                member = find(p, m, tag >> 3);
                                if (member < 0 || (uint32_t)p->fields[member].tag != tag) {
                                        inner = at;
                                        if (!read_unexpected(d, member, &inner, end, tag, depth, m->owner))
                                                return 0;
                                        at = inner;
                                        continue;
                                }
                                field = p->fields + member;
                        }
                }
                member = (int32_t)(field - p->fields);
                switch (field->reader) {
                case ONE_NUMBER:
                        if (!read_single_number(d, field, member, slot, &at, end))
                                return 0;
                        field++;
                        continue;
                case TEXT:
                        if (!read_text(d, field, member, slot, &at, end))
                                return 0;
                        field++;
                        continue;
                }
                inner = at;
                switch (field->reader) {
                case NUMBERS:
                        read = read_repeated_number(d, member, &inner, end, (tag & 7) == LEN);
                        break;
                case NARROWED_NUMBER:
                        read = are_kept(d, member, inner, end, 0) &&
                               read_single_number(d, field, member, slot, &inner, end);
                        break;
                case NARROWED_NUMBERS:
                        read = are_kept(d, member, inner, end, (tag & 7) == LEN) &&
                               read_repeated_number(d, member, &inner, end, (tag & 7) == LEN);
                        break;
                case ELEMENTS:
                        read = read_element(d, member, &inner, end, depth);
                        break;
                case ENTRIES:
                        read = read_entry(d, member, &inner, end, depth);
                        break;
                default:
                        read = read_single(d, member, slot, &inner, end, depth);
                }
                if (!read)
                        return 0;
                at = inner;
        }
        *position = at;
        return !group || fail(d, E_TRUNCATED, m->owner, 0);
}

/* Reads a message. */
static int parse(decoded_t *d, int32_t message, int64_t slot, const uint8_t **at, const uint8_t *end, uint32_t group,
                 int depth) {
        int32_t outer = d->unknown;
        int read;

        d->unknown            = 0;
        read                  = parse_fields(d, message, slot, at, end, group, depth);
        d->ended_with_unknown = d->unknown;
        d->unknown            = outer;
        return read;
}

/* ---- decoding ------------------------------------------------------------------------------------------ */

EXPORT void kafka_eos_protobuf_free(decoded_t *d) {
        int32_t i;

        if (!d)
                return;
        for (i = 0; d->columns && i < d->program->field_count; i++) {
                column_t *c = &d->columns[i];
                free(c->validity.at);
                free(c->values.at);
                free(c->offsets.at);
                free(c->entry_offsets.at);
                free(c->data.at);
                free(c->dropped.at);
        }
        free(d->columns);
        free(d->frames);
        free(d->oneofs);
        free(d->validity.at);
        free(d->errors.at);
        free(d);
}

/* Returns the memory that a result has allocated, with what Python needs in addition for as many elements. */
EXPORT int64_t kafka_eos_protobuf_capacity(const decoded_t *d) {
        int64_t bytes = 0;
        int32_t i;

        for (i = 0; i < d->program->field_count; i++) {
                const column_t *c = &d->columns[i];
                const field_t *f  = &d->program->fields[i];
                if (f->flags & REPEATED && f->extra_bytes)
                        bytes += c->values.capacity / widths[f->kind] * f->extra_bytes;
                bytes += c->validity.capacity + c->values.capacity + c->offsets.capacity +
                         c->entry_offsets.capacity + c->data.capacity + c->dropped.capacity;
        }
        return bytes;
}

static void forget(part_t *part) { part->bytes = 0; }

/* Makes a result empty that nobody reads any more, and keeps its memory for the next one. */
static void empty(decoded_t *d) {
        const decoded_t before = *d;
        int32_t i;

        for (i = 0; i < d->program->field_count; i++) {
                column_t *c = &d->columns[i];
                forget(&c->validity);
                forget(&c->values);
                forget(&c->offsets);
                forget(&c->entry_offsets);
                forget(&c->data);
                forget(&c->dropped);
                c->elements = c->filled = 0;
        }
        memset(d, 0, sizeof(*d));
        memset(before.frames, 0, (size_t)before.program->frame_count * sizeof(*before.frames));
        d->program  = before.program;
        d->columns  = before.columns;
        d->frames   = before.frames;
        d->oneofs   = before.oneofs;
        d->validity = before.validity;
        d->errors   = before.errors;
        forget(&d->validity);
        forget(&d->errors);
}

static decoded_t *new_result(const program_t *program) {
        decoded_t *d = calloc(1, sizeof(*d));

        if (!d)
                return NULL;
        d->program = program;
        d->columns = calloc((size_t)program->field_count + 1, sizeof(*d->columns));
        d->frames  = calloc((size_t)program->frame_count, sizeof(*d->frames));
        d->oneofs  = calloc((size_t)program->oneof_count + 1, sizeof(*d->oneofs));
        if (d->columns && d->frames && d->oneofs)
                return d;
        kafka_eos_protobuf_free(d);
        return NULL;
}

/* Decodes one message to the next row. On an error, the row remains as it was before. */
static int decode_row(decoded_t *d, const uint8_t *at, int64_t bytes, int32_t start) {
        const uint8_t *from = at + start;
        int64_t slot;

        if (bytes < start)
                return fail(d, E_START, -1, bytes);
        slot = open_row(d, 0);
        return slot >= 0 && parse(d, 0, slot, &from, at + bytes, 0, 0) && close_row(d, 0, slot, 1);
}

/*
 * Decodes messages. `offsets` are int32, or int64 if `wide`; `validity` is a bitmap, or NULL. Each message begins
 * with `start` bytes that are not payload. The columns take at most `most_bytes`, so perhaps only the first messages
 * are decoded; `rows` tells how many. A message that cannot be decoded adds an error. Free the result with
 * kafka_eos_protobuf_free while `program` still exists. Returns NULL if there is not enough memory; if memory runs
 * out later, `no_memory` is set in the result. `spare` is a result of the same program that nobody reads any more, or
 * NULL: the call reuses its memory, which the process need not get from the operating system again.
 */
EXPORT decoded_t *kafka_eos_protobuf_decode(const program_t *program, const void *offsets, int32_t wide,
                                            const uint8_t *data, const uint8_t *validity, int64_t validity_offset,
                                            int64_t rows, int32_t start, int64_t most_bytes,
                                            decoded_t *spare) {
        static const uint8_t nothing = 0;
        decoded_t *d                 = spare ? spare : new_result(program);
        int64_t row;
        int32_t i;

        if (!d)
                return NULL;
        if (spare)
                empty(d);
        d->allowance.left = most_bytes - (spare ? kafka_eos_protobuf_capacity(d) : 0);
        d->messages       = rows;
        if (!extend(&d->validity, rows, NULL)) {
                kafka_eos_protobuf_free(d);
                return NULL;
        }
        for (i = 0; i < program->field_count; i++)
                d->columns[i].slot = -1;
        for (i = 0; i < program->oneof_count; i++)
                d->oneofs[i].slot = -1;
        if (!data)
                data = &nothing;
        for (row = 0; row < rows && !d->no_memory; row++) {
                int64_t bit  = validity_offset + row;
                int64_t from = wide ? ((const int64_t *)offsets)[row] : ((const int32_t *)offsets)[row];
                int64_t to   = wide ? ((const int64_t *)offsets)[row + 1] : ((const int32_t *)offsets)[row + 1];
                int64_t slot;

                if (!validity || validity[bit >> 3] >> (bit & 7) & 1) {
                        if (decode_row(d, data + from, to - from, start)) {
                                d->validity.at[row] = 1;
                                continue;
                        }
                        if (d->no_memory || d->code == E_STOP)
                                break;
                        {
                                error_t error = {row, d->code, d->field, d->detail};
                                if (!append(&d->errors, &error, sizeof(error))) {
                                        d->no_memory = 1;
                                        break;
                                }
                        }
                        truncate_frame(d, 0, row);
                        for (i = 0; i < program->oneof_count; i++)
                                d->oneofs[i].slot = -1;
                }
                slot = open_row(d, 0);
                if (slot < 0 || !close_row(d, 0, slot, 0))
                        break;
        }
        if (row < rows)
                truncate_frame(d, 0, row);
        for (i = 0; i < program->field_count; i++) /* a column without slots has no offsets, either */
                if (d->columns[i].offsets.at && !(program->fields[i].flags & REPEATED))
                        fill_offsets(&d->columns[i], d->frames[program->fields[i].frame].rows);
        d->rows = row;
        return d;
}

/* ---- encoding ------------------------------------------------------------------------------------------ */

/*
 * The column of a field. Everything but `offsets` and `validity` of a repeated field is indexed by element; all
 * else by slot. The same layout as native.INPUT.
 */
typedef struct {
        const uint8_t *validity;         /* a byte per slot; NULL = no nulls */
        const uint8_t *element_validity; /* repeated: a byte per element; NULL = no nulls */
        const uint8_t *unfit;            /* a byte per value that cannot be encoded; NULL = none */
        const uint8_t *values;           /* of fixed width */
        const int32_t *offsets;          /* repeated: of elements; otherwise of bytes */
        const int32_t *entry_offsets;    /* repeated and of variable size: of bytes */
        const uint8_t *data;
        int64_t missing; /* there is no such column */
} input_t;

/* What kafka_eos_protobuf_encode returns. native.Encoded has the same layout up to `rows`. */
typedef struct {
        part_t validity; /* a byte per row */
        part_t offsets;  /* int32 per row, and one more */
        part_t data;
        part_t errors; /* error_t */
        int64_t no_memory;
        int64_t rows; /* that were encoded; fewer than given if the column became too large */
        const program_t *program;
        const input_t *inputs;
        allowance_t allowance;
        int64_t most_bytes;
        uint8_t *scratch; /* a message is written from the end, because a length comes before what it counts */
        int64_t capacity, at;
        oneof_t *oneofs;
        int64_t messages; /* number of messages begun; tells which of them set a oneof */
        int64_t detail;
        int32_t code, field;
} encoded_t;

static int refuse(encoded_t *e, int32_t code, int32_t field, int64_t detail) {
        e->code   = code;
        e->field  = field;
        e->detail = detail;
        return 0;
}

/* Fails because a buffer cannot grow: memory ran out, or the call has used all that it may. */
static int no_room_to_encode(encoded_t *e) {
        if (!e->allowance.is_exceeded)
                e->no_memory = 1;
        return refuse(e, e->allowance.is_exceeded ? E_STOP : E_MEMORY, -1, 0);
}

/* Makes room for `bytes` before what was written. */
static int make_room(encoded_t *e, int64_t bytes) {
        int64_t used = e->capacity - e->at, capacity = e->capacity ? e->capacity : 1024;
        uint8_t *scratch;

        if (bytes <= e->at)
                return 1;
        if (bytes > e->most_bytes - used)
                return refuse(e, E_STOP, -1, 0);
        while (capacity < used + bytes)
                capacity *= 2;
        scratch = malloc((size_t)capacity);
        if (!scratch)
                return no_room_to_encode(e);
        if (used)
                memcpy(scratch + capacity - used, e->scratch + e->at, (size_t)used);
        free(e->scratch);
        e->scratch  = scratch;
        e->capacity = capacity;
        e->at       = capacity - used;
        return 1;
}

static int put_bytes(encoded_t *e, const void *from, int64_t bytes) {
        if (!make_room(e, bytes))
                return 0;
        e->at -= bytes;
        if (bytes)
                memcpy(e->scratch + e->at, from, (size_t)bytes);
        return 1;
}

static int put_varint(encoded_t *e, uint64_t value) {
        uint8_t bytes[10];
        int64_t count = 0;

        do {
                bytes[count++] = (uint8_t)((value & 0x7F) | (value > 0x7F ? 0x80 : 0));
                value >>= 7;
        } while (value);
        return put_bytes(e, bytes, count);
}

static int put_tag(encoded_t *e, int32_t number, uint32_t wire_type) {
        return put_varint(e, (uint64_t)(uint32_t)number << 3 | wire_type);
}

static uint64_t stored_number(const field_t *field, const input_t *input, int64_t index) {
        uint64_t bits;
        int32_t word;

        switch (widths[field->kind]) {
        case 1:
                return input->values[index] != 0;
        case 4:
                memcpy(&word, input->values + index * 4, 4);
                return (uint64_t)(int64_t)word;
        default:
                memcpy(&bits, input->values + index * 8, 8);
                return bits;
        }
}

static int put_number(encoded_t *e, int32_t kind, uint64_t bits) {
        switch (wire_types[kind]) {
        case I64:
                return put_bytes(e, &bits, 8);
        case I32:
                return put_bytes(e, &bits, 4);
        default:
                if (kind == SINT32)
                        bits = (uint32_t)((uint32_t)bits << 1 ^ (0u - (uint32_t)(bits >> 63)));
                else if (kind == SINT64)
                        bits = bits << 1 ^ (0ULL - (bits >> 63));
                return put_varint(e, bits);
        }
}

static int put_time(encoded_t *e, int32_t kind, int64_t micros) {
        int64_t seconds = micros / 1000000, rest = micros % 1000000, begin;

        if (kind == TIMESTAMP && rest < 0) {
                seconds--;
                rest += 1000000;
        }
        begin = e->capacity - e->at;
        if (rest && !(put_varint(e, (uint64_t)(rest * 1000)) && put_tag(e, 2, VARINT)))
                return 0;
        if (seconds && !(put_varint(e, (uint64_t)seconds) && put_tag(e, 1, VARINT)))
                return 0;
        return put_varint(e, (uint64_t)(e->capacity - e->at - begin));
}

static int put_message(encoded_t *e, int32_t message, int64_t slot, int in_entry);

/* Writes one value without its tag, or a group with both of its tags. */
static int put_value(encoded_t *e, int32_t member, int64_t index) {
        const field_t *field = &e->program->fields[member];
        const input_t *input = &e->inputs[member];
        const int32_t *offsets;
        int64_t begin, bytes;

        if (input->unfit && input->unfit[index])
                return refuse(e, E_RANGE, member, index);
        switch (field->kind) {
        case MESSAGE:
                begin = e->capacity - e->at;
                return put_message(e, field->message, index, field->flags & MAP) &&
                       put_varint(e, (uint64_t)(e->capacity - e->at - begin));
        case GROUP:
                return put_tag(e, field->number, END_GROUP) && put_message(e, field->message, index, 0);
        case TIMESTAMP:
        case DURATION:
                return put_time(e, field->kind, (int64_t)stored_number(field, input, index));
        case STRING:
        case BYTES:
        case RAW:
                offsets = field->flags & REPEATED ? input->entry_offsets : input->offsets;
                bytes   = offsets[index + 1] - offsets[index];
                if (field->kind == STRING && !is_utf8(input->data + offsets[index], bytes))
                        return refuse(e, E_UTF8, member, index);
                return put_bytes(e, input->data + offsets[index], bytes) && put_varint(e, (uint64_t)bytes);
        default:
                return put_number(e, field->kind, stored_number(field, input, index));
        }
}

static int is_zero(const field_t *field, const input_t *input, int64_t slot) {
        if (widths[field->kind] && field->kind != TIMESTAMP && field->kind != DURATION)
                return !stored_number(field, input, slot) && !(input->unfit && input->unfit[slot]);
        if (field->kind == STRING || field->kind == BYTES)
                return input->offsets[slot] == input->offsets[slot + 1];
        return 0;
}

static int put_repeated(encoded_t *e, int32_t member, int64_t slot) {
        const field_t *field = &e->program->fields[member];
        const input_t *input = &e->inputs[member];
        int64_t first = input->offsets[slot], last = input->offsets[slot + 1], index;
        int64_t begin = e->capacity - e->at;
        int packed    = field->flags & PACKED;

        for (index = last - 1; index >= first; index--) {
                if (input->element_validity && !input->element_validity[index])
                        return refuse(e, E_NULL_ELEMENT, member, index);
                if (!put_value(e, member, index) ||
                    (!packed && !put_tag(e, field->number, wire_types[field->kind])))
                        return 0;
        }
        return !packed || first >= last ||
               (put_varint(e, (uint64_t)(e->capacity - e->at - begin)) && put_tag(e, field->number, LEN));
}

/* Writes the fields of a message, the last one first. */
static int put_message(encoded_t *e, int32_t message, int64_t slot, int in_entry) {
        const program_t *p = e->program;
        const message_t *m = &p->messages[message];
        int64_t serial     = e->messages++;
        int32_t i;

        for (i = m->count - 1; i >= 0; i--) {
                int32_t member       = m->first + i;
                const field_t *field = &p->fields[member];
                const input_t *input = &e->inputs[member];

                if (input->missing)
                        continue;
                if (input->validity && !input->validity[slot]) {
                        if (in_entry)
                                return refuse(e, E_NULL_ELEMENT, member, slot);
                        if (field->flags & REQUIRED)
                                return refuse(e, E_REQUIRED, member, slot);
                        continue;
                }
                if (field->flags & REPEATED) {
                        if (!put_repeated(e, member, slot))
                                return 0;
                        continue;
                }
                if (!in_entry && !(field->flags & EXPLICIT) && is_zero(field, input, slot))
                        continue;
                if (field->oneof >= 0) {
                        oneof_t *oneof = &e->oneofs[field->oneof];
                        if (oneof->slot == serial)
                                return refuse(e, E_ONEOF, member, oneof->case_field);
                        oneof->slot       = serial;
                        oneof->case_field = member;
                }
                if (!put_value(e, member, slot) || !put_tag(e, field->number, wire_types[field->kind]))
                        return 0;
        }
        return 1;
}

EXPORT void kafka_eos_protobuf_free_encoded(encoded_t *e) {
        if (!e)
                return;
        free(e->validity.at);
        free(e->offsets.at);
        free(e->data.at);
        free(e->errors.at);
        free(e->scratch);
        free(e->oneofs);
        free(e);
}

static int encode_row(encoded_t *e, int64_t row, const uint8_t *prefix, int64_t prefix_bytes) {
        int64_t bytes;

        e->at = e->capacity;
        if (!put_message(e, 0, row, 0))
                return 0;
        bytes = e->capacity - e->at;
        if (prefix_bytes + bytes > KAFKA_EOS_LARGEST_OFFSET - e->data.bytes)
                return refuse(e, E_STOP, -1, 0);
        if (!reserve_within(&e->data, prefix_bytes + bytes, &e->allowance))
                return no_room_to_encode(e);
        append(&e->data, prefix, prefix_bytes);
        append(&e->data, e->scratch + e->at, bytes);
        e->validity.at[row] = 1;
        return 1;
}

/*
 * Encodes rows as messages, each after a prefix. `validity` has a byte per row, or is NULL. The column takes at most
 * `most_bytes`, so perhaps only the first rows are encoded; `rows` tells how many. A row that cannot be encoded adds
 * an error. Free the result with kafka_eos_protobuf_free_encoded. Returns NULL if there is not enough
 * memory; if memory runs out later, `no_memory` is set in the result.
 */
EXPORT encoded_t *kafka_eos_protobuf_encode(const program_t *program, const input_t *inputs, const uint8_t *validity,
                                            int64_t rows, const uint8_t *prefix, int64_t prefix_bytes, int64_t most_bytes) {
        encoded_t *e = calloc(1, sizeof(*e));
        int64_t row;
        int32_t i;

        if (!e)
                return NULL;
        e->program = program;
        e->inputs  = inputs;
        e->allowance.left = e->most_bytes = most_bytes;
        e->oneofs  = calloc((size_t)program->oneof_count + 1, sizeof(*e->oneofs));
        if (!e->oneofs || !extend(&e->validity, rows, NULL) || !extend(&e->offsets, (rows + 1) * 4, NULL)) {
                kafka_eos_protobuf_free_encoded(e);
                return NULL;
        }
        for (i = 0; i < program->oneof_count; i++)
                e->oneofs[i].slot = -1;
        for (row = 0; row < rows && !e->no_memory; row++) {
                if ((!validity || validity[row]) && !encode_row(e, row, prefix, prefix_bytes)) {
                        error_t error = {row, e->code, e->field, e->detail};
                        if (e->no_memory || e->code == E_STOP)
                                break;
                        if (!append(&e->errors, &error, sizeof(error)))
                                e->no_memory = 1;
                }
                OFFSETS(e->offsets)[row + 1] = (int32_t)e->data.bytes;
        }
        e->rows = row;
        return e;
}
