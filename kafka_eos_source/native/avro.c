/*
 * Decodes Avro payloads into Arrow buffers, and encodes Arrow arrays as Avro payloads.
 *
 * Python (registry/avro/) compiles a schema into a program: a tree of nodes in one flat array. The functions below
 * interpret the program for each row. The program is trusted, because Python wrote it. Payloads are not: every
 * read is checked against the end of its message, and no amount of memory depends on a length before as many bytes
 * as it says are known to be there.
 *
 * This is a plain shared library that links against nothing, like kernel.c. It has no state. Callers must release
 * Python's GIL, which ctypes does. registry/avro/decode_twin.py and encode_twin.py do the same in Python, with the
 * same results and errors. If you change one, change KAFKA_EOS_AVRO_VERSION here and AVRO_VERSION in loader.py.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define KAFKA_EOS_AVRO_VERSION 1

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

EXPORT int32_t kafka_eos_avro_version(void) { return KAFKA_EOS_AVRO_VERSION; }

/* ---- buffers ------------------------------------------------------------------------------------------- */

/* A buffer that grows. Python reads `at` and `bytes`. */
typedef struct {
        uint8_t *at;
        int64_t bytes;
        int64_t capacity;
} part_t;

/* What went wrong, for whoever formats it: errors.py has the texts. */
typedef struct {
        int64_t row, node, code, detail, more;
} error_t;

enum {
        TRUNCATED = 1,
        VARINT,
        INT_RANGE,
        UNION_INDEX,
        ENUM_INDEX,
        ENUM_SYMBOL,
        NEGATIVE_LENGTH,
        UTF8,
        DECIMAL_SIZE,
        OVERFLOW,
        BRANCH,
        TRAILING,
        SHORT,
        EMPTY_ITEMS,
        ROW_BYTES,
        DEPTH,
        BOOLEAN,
        BLOCK_BYTES,
        NULL_VALUE,
        FIXED_SIZE,
        SYMBOL,
        MEMBERS
};

/* Why a whole call failed; not the fault of one row. */
enum { DONE = 0, NO_MEMORY = 1, BATCH_BYTES = 2 };

/* The most that one row may add to the columns; a hostile payload of a few bytes cannot ask for more. */
#define MAX_ROW_BYTES ((int64_t)256 << 20)
/* The most items of arrays and maps in one row that take no bytes in the payload. */
#define MAX_EMPTY_ITEMS 65536
/* The most records, arrays and maps inside each other: fields that are skipped can be recursive. */
#define MAX_DEPTH 100

/* Makes room for `more` bytes. Returns 0 if there is not enough memory. */
static int grow(part_t *part, int64_t more) {
        int64_t capacity = part->capacity ? part->capacity : 256;
        uint8_t *at;

        while (capacity < part->bytes + more)
                capacity *= 2;
        at = realloc(part->at, (size_t)capacity);
        if (!at)
                return 0;
        part->at       = at;
        part->capacity = capacity;
        return 1;
}

static inline int reserve(part_t *part, int64_t more) {
        return part->bytes + more <= part->capacity || grow(part, more);
}

/* Returns whether a string is valid UTF-8 as Python and the Unicode standard (table 3-7) define it. */
static int is_utf8(const uint8_t *at, int64_t bytes) {
        const uint8_t *past = at + bytes;
        while (at < past) {
                uint8_t first, low = 0x80, high = 0xBF;
                int more;
                while (past - at >= 8) {
                        uint64_t eight;
                        memcpy(&eight, at, 8);
                        if (eight & UINT64_C(0x8080808080808080))
                                break;
                        at += 8;
                }
                if (at == past)
                        return 1;
                first = *at++;
                if (first < 0x80)
                        continue;
                if (first >= 0xC2 && first <= 0xDF) {
                        more = 1;
                } else if (first >= 0xE0 && first <= 0xEF) {
                        more = 2;
                        if (first == 0xE0)
                                low = 0xA0; /* overlong */
                        else if (first == 0xED)
                                high = 0x9F; /* a surrogate */
                } else if (first >= 0xF0 && first <= 0xF4) {
                        more = 3;
                        if (first == 0xF0)
                                low = 0x90; /* overlong */
                        else if (first == 0xF4)
                                high = 0x8F; /* beyond U+10FFFF */
                } else {
                        return 0;
                }
                if (past - at < more || *at < low || *at > high)
                        return 0;
                for (at++; --more; at++)
                        if (*at < 0x80 || *at > 0xBF)
                                return 0;
        }
        return 1;
}

/* 128-bit two's complement, least significant half first, as Arrow stores decimals on little-endian machines. */
typedef struct {
        uint64_t low;
        int64_t high;
} wide_t;

static int is_magnitude_below(wide_t value, const uint64_t limit[2]) {
        uint64_t low = value.low, high = (uint64_t)value.high;
        if (value.high < 0) { /* -value; the most negative number becomes 2^127, which is beyond each limit */
                low  = ~low + 1;
                high = ~high + (low == 0);
        }
        return high < limit[1] || (high == limit[1] && low < limit[0]);
}

/* ---- decoding ------------------------------------------------------------------------------------------ */

/* How a node reads. A node whose column is -1 only skips. `program.py` describes the operands. */
enum {
        OP_NULL = 0,
        OP_BOOLEAN,
        OP_INT,
        OP_LONG,
        OP_FLOAT,
        OP_DOUBLE,
        OP_BYTES,
        OP_STRING,
        OP_FIXED,
        OP_ENUM,
        OP_DECIMAL,
        OP_DECIMAL_FIXED,
        OP_RECORD,
        OP_ARRAY,
        OP_MAP,
        OP_UNION,
        OP_MEMBER,
        OP_DEFAULT,
        OP_MISMATCH
};

typedef struct {
        int64_t op, column, first, count, a, b;
} node_t;

/* How a column stores its values. */
enum { NONE = 0, BITS, I32, I64, F32, F64, D128, TEXT, STRUCT, LIST };

typedef struct {
        int64_t kind, first, count, rows;
        part_t validity, values, heap;
} column_t;

/* The input of a call. Python owns all memory of it. */
typedef struct {
        const node_t *nodes;
        const int64_t *links;   /* children of nodes, and of columns */
        const int64_t *symbols; /* offset and length in `text` of each symbol; length -1: the reader lacks it */
        const uint8_t *text;    /* symbols, and default values in Avro's encoding */
        const int64_t *columns; /* kind, first, count of each */
        int64_t column_count;
        const uint8_t *validity; /* of the messages; NULL = none is null */
        const uint8_t *offsets;
        const uint8_t *data;
        int64_t offset_width, offset, rows, start;
} input_t;

typedef struct {
        int64_t rows, status, column_count;
        part_t errors;
        column_t columns[];
} block_t;

typedef struct {
        const input_t *input;
        column_t *columns;
        const uint8_t *at, *past;
        int64_t budget, empty_items, depth, status;
        error_t error;
} run_t;

static int fail(run_t *run, int64_t node, int64_t code, int64_t detail, int64_t more) {
        run->error.node   = node;
        run->error.code   = code;
        run->error.detail = detail;
        run->error.more   = more;
        return 0;
}

static int abandon(run_t *run, int64_t status) {
        run->status = status;
        return 0;
}

/* Takes `bytes` from the row's budget, and makes room for them. */
static inline int room(run_t *run, int64_t node, part_t *part, int64_t bytes) {
        run->budget -= bytes + 1;
        if (run->budget < 0)
                return fail(run, node, ROW_BYTES, MAX_ROW_BYTES, 0);
        return reserve(part, bytes) || abandon(run, NO_MEMORY);
}

static inline int append_bit(run_t *run, int64_t node, part_t *part, int64_t index, int bit) {
        uint8_t mask = (uint8_t)(1u << (index & 7));
        if ((index & 7) == 0) {
                if (!room(run, node, part, 1))
                        return 0;
                part->at[part->bytes++] = 0;
        }
        if (bit)
                part->at[index >> 3] |= mask;
        else
                part->at[index >> 3] &= (uint8_t)~mask;
        return 1;
}

/* Ends a row of a column: its value is stored, or is null. */
static inline int end_row(run_t *run, int64_t node, column_t *column, int is_valid) {
        if (!append_bit(run, node, &column->validity, column->rows, is_valid))
                return 0;
        column->rows++;
        return 1;
}

static inline int append_value(run_t *run, int64_t node, column_t *column, const void *value, int64_t width) {
        if (!room(run, node, &column->values, width))
                return 0;
        memcpy(column->values.at + column->values.bytes, value, (size_t)width);
        column->values.bytes += width;
        return end_row(run, node, column, 1);
}

static inline int append_offset(run_t *run, int64_t node, column_t *column, int64_t offset) {
        int32_t narrow = (int32_t)offset;
        if (offset > INT32_MAX)
                return abandon(run, BATCH_BYTES);
        if (!room(run, node, &column->values, 4))
                return 0;
        memcpy(column->values.at + column->values.bytes, &narrow, 4);
        column->values.bytes += 4;
        return 1;
}

static inline int append_text(run_t *run, int64_t node, column_t *column, const uint8_t *at, int64_t bytes) {
        if (!room(run, node, &column->heap, bytes))
                return 0;
        if (bytes > 0)
                memcpy(column->heap.at + column->heap.bytes, at, (size_t)bytes);
        column->heap.bytes += bytes;
        return append_offset(run, node, column, column->heap.bytes) && end_row(run, node, column, 1);
}

static const int64_t WIDTHS[] = {0, 0, 4, 8, 4, 8, 16, 4, 0, 4};

static int append_null(run_t *run, int64_t node, column_t *column) {
        static const uint8_t zeros[16] = {0};
        int64_t child;

        switch (column->kind) {
        case NONE:
                break;
        case BITS:
                if (!append_bit(run, node, &column->values, column->rows, 0))
                        return 0;
                break;
        case TEXT:
                if (!append_offset(run, node, column, column->heap.bytes))
                        return 0;
                break;
        case LIST:
                if (!append_offset(run, node, column, run->columns[run->input->links[column->first]].rows))
                        return 0;
                break;
        case STRUCT:
                for (child = 0; child < column->count; child++)
                        if (!append_null(run, node, &run->columns[run->input->links[column->first + child]]))
                                return 0;
                break;
        default:
                if (!room(run, node, &column->values, WIDTHS[column->kind]))
                        return 0;
                memcpy(column->values.at + column->values.bytes, zeros, (size_t)WIDTHS[column->kind]);
                column->values.bytes += WIDTHS[column->kind];
        }
        return end_row(run, node, column, 0);
}

static int64_t offset_at(const column_t *column, int64_t row) {
        int32_t offset;
        memcpy(&offset, column->values.at + row * 4, 4);
        return offset;
}

/* Takes back what a row that failed appended. */
static void truncate_rows(run_t *run, column_t *column, int64_t rows) {
        int64_t child;

        switch (column->kind) {
        case NONE:
                break;
        case BITS:
                column->values.bytes = (rows + 7) >> 3;
                break;
        case TEXT:
                column->heap.bytes   = offset_at(column, rows);
                column->values.bytes = (rows + 1) * 4;
                break;
        case LIST:
                truncate_rows(run, &run->columns[run->input->links[column->first]], offset_at(column, rows));
                column->values.bytes = (rows + 1) * 4;
                break;
        case STRUCT:
                for (child = 0; child < column->count; child++)
                        truncate_rows(run, &run->columns[run->input->links[column->first + child]], rows);
                break;
        default:
                column->values.bytes = rows * WIDTHS[column->kind];
        }
        column->validity.bytes = (rows + 7) >> 3;
        column->rows           = rows;
}

static int read_long_varint(run_t *run, int64_t node, int64_t *value) {
        const uint8_t *at = run->at;
        uint64_t bits     = 0;
        int shift         = 0;

        for (;;) {
                uint8_t byte;
                if (at == run->past)
                        return fail(run, node, TRUNCATED, 1, 0);
                byte = *at++;
                if (shift == 63 && byte > 1)
                        return fail(run, node, VARINT, 0, 0);
                bits |= (uint64_t)(byte & 0x7F) << shift;
                if (byte < 0x80)
                        break;
                shift += 7;
        }
        run->at = at;
        *value  = (int64_t)(bits >> 1) ^ -(int64_t)(bits & 1);
        return 1;
}

static inline int read_varint(run_t *run, int64_t node, int64_t *value) {
        if (run->at < run->past && *run->at < 0x80) {
                uint8_t byte = *run->at++;
                *value       = (int64_t)(byte >> 1) ^ -(int64_t)(byte & 1);
                return 1;
        }
        return read_long_varint(run, node, value);
}

static inline int need(run_t *run, int64_t node, int64_t bytes) {
        int64_t left = run->past - run->at;
        return bytes <= left || fail(run, node, TRUNCATED, bytes, left);
}

/* Reads the length of bytes or a string, and checks that they are there. */
static inline int read_length(run_t *run, int64_t node, int64_t *bytes) {
        if (!read_varint(run, node, bytes))
                return 0;
        if (*bytes < 0)
                return fail(run, node, NEGATIVE_LENGTH, *bytes, 0);
        return need(run, node, *bytes);
}

static int append_number(run_t *run, int64_t index, int64_t number) {
        const node_t *node = &run->input->nodes[index];
        column_t *column   = &run->columns[node->column];

        switch (column->kind) {
        case I32: {
                int32_t value = (int32_t)number;
                return append_value(run, index, column, &value, 4);
        }
        case I64:
                if (node->a > 1) {
                        if (number > INT64_MAX / node->a || number < INT64_MIN / node->a)
                                return fail(run, index, OVERFLOW, number, 0);
                        number *= node->a;
                } else if (node->b > 1) {
                        number = number / node->b - (number % node->b < 0);
                }
                return append_value(run, index, column, &number, 8);
        case F32: {
                float value = (float)number;
                return append_value(run, index, column, &value, 4);
        }
        default: {
                double value = (double)number;
                return append_value(run, index, column, &value, 8);
        }
        }
}

/* Appends a big-endian two's complement number of any size. The limit 10^precision follows in `symbols`. */
static int append_decimal(run_t *run, int64_t index, const uint8_t *at, int64_t bytes) {
        const node_t *node = &run->input->nodes[index];
        uint8_t sign       = bytes > 0 && (*at & 0x80) ? 0xFF : 0;
        int64_t all        = bytes, taken;
        uint64_t limit[2], high;
        wide_t value;

        if (bytes == 0)
                return fail(run, index, DECIMAL_SIZE, 0, 0);
        memcpy(limit, &run->input->symbols[node->first], 16);
        for (; bytes > 16; at++, bytes--)
                if (*at != sign)
                        return fail(run, index, DECIMAL_SIZE, all, 0);
        if ((*at & 0x80) != (sign & 0x80))
                return fail(run, index, DECIMAL_SIZE, all, 0);
        value.low = sign ? UINT64_MAX : 0;
        high      = value.low;
        for (taken = 0; taken < bytes; taken++) {
                high      = high << 8 | value.low >> 56;
                value.low = value.low << 8 | at[taken];
        }
        value.high = (int64_t)high;
        if (!is_magnitude_below(value, limit))
                return fail(run, index, DECIMAL_SIZE, all, 0);
        return append_value(run, index, &run->columns[node->column], &value, 16);
}

static int decode_node(run_t *run, int64_t index);

/* Reads the blocks of an array or a map. */
static int decode_items(run_t *run, int64_t index, int is_map) {
        const node_t *node = &run->input->nodes[index];
        column_t *column   = node->column < 0 ? NULL : &run->columns[node->column];
        column_t *items    = column ? &run->columns[run->input->links[column->first]] : NULL;
        column_t *keys     = items && is_map ? &run->columns[run->input->links[items->first]] : NULL;

        for (;;) {
                int64_t count, bytes = -1;
                if (!read_varint(run, index, &count))
                        return 0;
                if (count == 0)
                        break;
                if (count < 0) {
                        if (count == INT64_MIN)
                                return fail(run, index, NEGATIVE_LENGTH, count, 0);
                        count = -count;
                        if (!read_varint(run, index, &bytes))
                                return 0;
                        if (bytes < 0 || bytes > run->past - run->at)
                                return fail(run, index, BLOCK_BYTES, bytes, run->past - run->at);
                        if (!column) {
                                run->at += bytes;
                                continue;
                        }
                }
                if (node->b > 0) {
                        if (count > (run->past - run->at) / node->b)
                                return fail(run, index, TRUNCATED, count, run->past - run->at);
                } else {
                        if (count > MAX_EMPTY_ITEMS - run->empty_items)
                                return fail(run, index, EMPTY_ITEMS, count, MAX_EMPTY_ITEMS);
                        run->empty_items += count;
                }
                while (count--) {
                        if (is_map) {
                                int64_t length;
                                if (!read_length(run, index, &length))
                                        return 0;
                                if (!is_utf8(run->at, length))
                                        return fail(run, index, UTF8, 0, 0);
                                if (keys && !append_text(run, index, keys, run->at, length))
                                        return 0;
                                run->at += length;
                        }
                        if (!decode_node(run, node->a))
                                return 0;
                        if (keys && !end_row(run, index, items, 1))
                                return 0;
                }
        }
        if (!column)
                return 1;
        return append_offset(run, index, column, items->rows) && end_row(run, index, column, 1);
}

/* Decodes one value, and appends it to its column. Returns 0 on failure, which `run` describes. */
static int decode_node(run_t *run, int64_t index) {
        const node_t *node = &run->input->nodes[index];
        column_t *column   = node->column < 0 ? NULL : &run->columns[node->column];
        int64_t number;

        switch (node->op) {
        case OP_NULL:
                return !column || append_null(run, index, column);
        case OP_BOOLEAN: {
                uint8_t byte;
                if (!need(run, index, 1))
                        return 0;
                byte = *run->at++;
                if (byte > 1)
                        return fail(run, index, BOOLEAN, byte, 0);
                return !column || (append_bit(run, index, &column->values, column->rows, byte) &&
                                   end_row(run, index, column, 1));
        }
        case OP_INT:
                if (!read_varint(run, index, &number))
                        return 0;
                if (number != (int32_t)number)
                        return fail(run, index, INT_RANGE, number, 0);
                return !column || append_number(run, index, number);
        case OP_LONG:
                return read_varint(run, index, &number) && (!column || append_number(run, index, number));
        case OP_FLOAT: {
                float value;
                if (!need(run, index, 4))
                        return 0;
                memcpy(&value, run->at, 4);
                run->at += 4;
                if (column && column->kind == F64) {
                        double longer = value;
                        return append_value(run, index, column, &longer, 8);
                }
                return !column || append_value(run, index, column, &value, 4);
        }
        case OP_DOUBLE:
                if (!need(run, index, 8))
                        return 0;
                run->at += 8;
                return !column || append_value(run, index, column, run->at - 8, 8);
        case OP_BYTES:
        case OP_STRING:
        case OP_DECIMAL:
                if (!read_length(run, index, &number))
                        return 0;
                run->at += number;
                if (node->op == OP_STRING && !is_utf8(run->at - number, number))
                        return fail(run, index, UTF8, 0, 0);
                if (!column)
                        return 1;
                if (node->op == OP_DECIMAL)
                        return append_decimal(run, index, run->at - number, number);
                return append_text(run, index, column, run->at - number, number);
        case OP_FIXED:
        case OP_DECIMAL_FIXED:
                if (!need(run, index, node->a))
                        return 0;
                run->at += node->a;
                if (!column)
                        return 1;
                if (node->op == OP_DECIMAL_FIXED)
                        return append_decimal(run, index, run->at - node->a, node->a);
                return append_text(run, index, column, run->at - node->a, node->a);
        case OP_ENUM: {
                const int64_t *symbol;
                if (!read_varint(run, index, &number))
                        return 0;
                if (number < 0 || number >= node->count)
                        return fail(run, index, ENUM_INDEX, number, node->count);
                if (!column)
                        return 1;
                symbol = run->input->symbols + node->first + 2 * number;
                if (symbol[1] < 0)
                        return fail(run, index, ENUM_SYMBOL, number, 0);
                return append_text(run, index, column, run->input->text + symbol[0], symbol[1]);
        }
        case OP_RECORD: {
                int64_t child;
                if (++run->depth > MAX_DEPTH)
                        return fail(run, index, DEPTH, MAX_DEPTH, 0);
                for (child = 0; child < node->count; child++)
                        if (!decode_node(run, run->input->links[node->first + child]))
                                return 0;
                run->depth--;
                return !column || end_row(run, index, column, 1);
        }
        case OP_ARRAY:
        case OP_MAP: {
                int done;
                if (++run->depth > MAX_DEPTH)
                        return fail(run, index, DEPTH, MAX_DEPTH, 0);
                done = decode_items(run, index, node->op == OP_MAP);
                run->depth--;
                return done;
        }
        case OP_UNION:
                if (!read_varint(run, index, &number))
                        return 0;
                if (number < 0 || number >= node->count)
                        return fail(run, index, UNION_INDEX, number, node->count);
                return decode_node(run, run->input->links[node->first + number]);
        case OP_MEMBER: {
                int64_t member;
                if (!decode_node(run, node->b))
                        return 0;
                for (member = 0; member < column->count; member++)
                        if (member != node->a &&
                            !append_null(run, index, &run->columns[run->input->links[column->first + member]]))
                                return 0;
                return end_row(run, index, column, 1);
        }
        case OP_DEFAULT: {
                const uint8_t *at = run->at, *past = run->past;
                int done;
                run->at   = run->input->text + node->a;
                run->past = run->at + node->b;
                done      = decode_node(run, node->first);
                run->at   = at;
                run->past = past;
                return done;
        }
        default:
                return fail(run, index, BRANCH, 0, 0);
        }
}

static int64_t input_offset(const input_t *input, int64_t row) {
        int64_t offset = 0;
        if (input->offset_width == 8) {
                memcpy(&offset, input->offsets + (input->offset + row) * 8, 8);
        } else {
                int32_t narrow;
                memcpy(&narrow, input->offsets + (input->offset + row) * 4, 4);
                offset = narrow;
        }
        return offset;
}

static int decode_row(run_t *run, int64_t row) {
        const input_t *input = run->input;
        int64_t first        = input_offset(input, row);
        int64_t past         = input_offset(input, row + 1);

        if (past - first < input->start)
                return fail(run, 0, SHORT, past - first, input->start);
        run->at          = input->data + first + input->start;
        run->past        = input->data + past;
        run->budget      = MAX_ROW_BYTES;
        run->empty_items = 0;
        run->depth       = 0;
        if (!decode_node(run, 0))
                return 0;
        if (run->at != run->past)
                return fail(run, 0, TRAILING, run->past - run->at, 0);
        return 1;
}

static inline int is_valid(const uint8_t *validity, int64_t index) {
        return !validity || (validity[index >> 3] >> (index & 7) & 1);
}

/*
 * Decodes all messages of `input`. Returns NULL if there is not enough memory for the block itself. Otherwise the
 * caller frees the block with kafka_eos_avro_free. A row that does not decode is null, with an entry in `errors`.
 */
EXPORT block_t *kafka_eos_avro_decode(const input_t *input) {
        block_t *block = calloc(1, sizeof(block_t) + (size_t)input->column_count * sizeof(column_t));
        run_t run      = {.input = input};
        int64_t row, index;

        if (!block)
                return NULL;
        block->column_count = input->column_count;
        run.columns         = block->columns;
        run.budget          = INT64_MAX;
        for (index = 0; index < input->column_count; index++) {
                column_t *column = &block->columns[index];
                column->kind     = input->columns[3 * index];
                column->first    = input->columns[3 * index + 1];
                column->count    = input->columns[3 * index + 2];
                if ((column->kind == TEXT || column->kind == LIST) && !append_offset(&run, 0, column, 0))
                        break;
        }
        for (row = 0; row < input->rows && !run.status; row++) {
                int ok = 1;
                if (is_valid(input->validity, input->offset + row)) {
                        if (decode_row(&run, row))
                                continue;
                        if (run.status)
                                break;
                        run.error.row = row;
                        truncate_rows(&run, &block->columns[0], row);
                        if (!reserve(&block->errors, sizeof(error_t))) {
                                run.status = NO_MEMORY;
                                break;
                        }
                        memcpy(block->errors.at + block->errors.bytes, &run.error, sizeof(error_t));
                        block->errors.bytes += (int64_t)sizeof(error_t);
                }
                run.budget = MAX_ROW_BYTES;
                ok         = append_null(&run, 0, &block->columns[0]);
                if (!ok && !run.status)
                        run.status = NO_MEMORY;
        }
        block->rows   = row;
        block->status = run.status;
        return block;
}

EXPORT void kafka_eos_avro_free(block_t *block) {
        int64_t index;
        if (!block)
                return;
        for (index = 0; index < block->column_count; index++) {
                free(block->columns[index].validity.at);
                free(block->columns[index].values.at);
                free(block->columns[index].heap.at);
        }
        free(block->errors.at);
        free(block);
}
