/*
 * Decodes JSON documents into Arrow buffers.
 *
 * documents/decode.py compiles a schema of Spark into a tree of nodes in one flat array; node 0 is the document. Each
 * node has one column. The functions below walk through each document once, and put values into the columns of the
 * fields that the schema declares. The nodes are trusted, because Python made them. Documents are not: a document is
 * copied to memory that ends with zero bytes, which JSON allows nowhere, so no function looks behind its end. What a
 * document makes is bounded by `most_bytes`: a call stops before the row with which the columns would take more, or an
 * offset would not fit into an int32, and the caller goes on from there with another call. Depth is bounded for
 * skipped values, too, which are read without recursion.
 *
 * A column is filled lazily: a field that is missing or null costs nothing until a later row has a value.
 *
 * json_scalars.h reads numbers, dates, times and base64. This is a plain shared library that uses nothing but the C
 * library. It has no state. Callers must release Python's GIL, which ctypes does. documents/decode.py declares the
 * structs. If you change one, change KAFKA_EOS_JSON_VERSION here and VERSIONS in __init__.py.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "buffers.h"
#include "json_scalars.h"

#define KAFKA_EOS_JSON_VERSION 1

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

EXPORT int32_t kafka_eos_json_version(void) { return KAFKA_EOS_JSON_VERSION; }

/* Zero bytes behind a document; no load of several bytes at once is longer. */
#define PADDING 64
/* As runtime/json_input.py. */
#define MOST_LEVELS 254

/* ---- the input and the result of a call ---------------------------------------------------------------- */

/* What a node reads, and how its column stores it. decode.py describes the operands. */
enum {
        OP_BOOLEAN = 0,
        OP_INT8,
        OP_INT16,
        OP_INT32,
        OP_INT64,
        OP_FLOAT,
        OP_DOUBLE,
        OP_DECIMAL,
        OP_STRING,
        OP_BINARY,
        OP_DATE,
        OP_TIMESTAMP,
        OP_TIMESTAMP_NTZ,
        OP_STRUCT,
        OP_ARRAY,
        OP_MAP
};

/* Bytes of a value; of an offset where the column has offsets. A boolean takes a bit. */
static const int64_t WIDTHS[] = {0, 1, 2, 4, 8, 4, 8, 16, 4, 4, 4, 8, 8, 0, 4, 4};

static inline int has_heap(int64_t op) { return op == OP_STRING || op == OP_BINARY; }
static inline int has_offsets(int64_t op) { return has_heap(op) || op == OP_ARRAY || op == OP_MAP; }

/* The children of a node are the nodes `first` to `first + count - 1`. `name` and `bytes`: its name in a struct. */
typedef struct {
        int64_t op, first, count, a, b, name, bytes;
} node_t;

typedef struct {
        const node_t *nodes;
        int64_t node_count;
        const uint8_t *names;      /* followed by eight zero bytes */
        const uint64_t *powers;    /* of five, see `approximate` */
        zone_t zone;
        const uint8_t *validity; /* of the documents; NULL = none is null */
        const uint8_t *offsets;
        const uint8_t *data;
        int64_t offset_width, offset, rows;
        int64_t most_bytes; /* that the columns may take */
        int64_t is_partial; /* a value that does not fit is null, and its neighbours stay */
} input_t;

typedef struct {
        int64_t rows, capacity;
        part_t validity, values, heap;
} column_t;

#define QUOTED_BYTES 64

/* Why a row is bad. decode.py has the texts. `text` begins the value, or what is at the place of a syntax error. */
typedef struct {
        int64_t row, node, code, at, bytes;
        uint8_t text[QUOTED_BYTES];
} error_t;

enum {
        MISFIT = 1,
        SURROGATE,
        REPEATED_KEY,
        LONG_NUMBER,
        /* the bytes are not one JSON object */
        EMPTY = 16,
        NO_OBJECT,
        ENDS_EARLY,
        UTF8,
        CONTROL_CHARACTER,
        ESCAPE,
        NO_VALUE,
        NUMBER,
        NAME,
        COLON,
        END_OF_FIELD,
        END_OF_ITEM,
        TOO_DEEP,
        TRAILING
};

/* How a call ended. STOPPED: the columns would have become too large; `rows` were converted before. */
enum { DONE = 0, NO_MEMORY = 1, STOPPED = 2 };

typedef struct {
        int64_t rows, status, column_count;
        part_t errors;
        column_t columns[];
} block_t;

/* A hash table of the names in a struct. */
typedef struct {
        uint64_t hash;
        int64_t child; /* -1 = the slot is free */
} slot_t;

typedef struct {
        slot_t *slots;
        int shift;
        uint64_t mask;
} table_t;

/*
 * A name as it was read last at its place in a struct. Most documents of a topic have the same names in the same order,
 * and comparing a name with the one that is expected is faster than looking for its end and finding it in a table.
 */
#define EXPECTED_WORDS 3
#define EXPECTED_NAMES 1024
typedef struct {
        uint64_t words[EXPECTED_WORDS], masks[EXPECTED_WORDS]; /* the name with its quotes and the colon */
        int64_t owner, child, bytes;                           /* the node of the struct, plus one; 0 = none */
} expected_t;

typedef struct {
        const input_t *input;
        const node_t *nodes;
        column_t *columns;
        table_t *tables; /* of each node */
        slot_t *slots;
        expected_t *expected;
        part_t document;           /* the document, and zero bytes behind it */
        part_t text, second, keys; /* for strings with escapes, and keys of maps */
        const uint8_t *past;       /* the end of the document */
        allowance_t allowance;
        part_t *errors;
        int64_t depth, status, row, noted_row;
        int64_t code, node; /* why a value or the document failed */
        const uint8_t *failed_at;
} run_t;

/* ---- failures ------------------------------------------------------------------------------------------- */

/* The document is no JSON object. */
KAFKA_EOS_COLD static const uint8_t *broken(run_t *run, int64_t code, const uint8_t *at) {
        if (at >= run->past && code != UTF8 && code != EMPTY) {
                at   = run->past;
                code = ENDS_EARLY;
        }
        run->code      = code;
        run->node      = 0;
        run->failed_at = at;
        return NULL;
}

/* The value that begins at `at` does not fit its type. */
KAFKA_EOS_COLD static const uint8_t *misfit(run_t *run, int64_t code, int64_t node, const uint8_t *at) {
        run->code      = code;
        run->node      = node;
        run->failed_at = at;
        return NULL;
}

/* The call cannot go on. */
KAFKA_EOS_COLD static const uint8_t *no_room(run_t *run) {
        run->status = run->allowance.is_exceeded ? STOPPED : NO_MEMORY;
        return NULL;
}

KAFKA_EOS_COLD static const uint8_t *stop(run_t *run) {
        run->allowance.is_exceeded = 1;
        return no_room(run);
}

/* ---- scanning -------------------------------------------------------------------------------------------- */

/* Returns the next quote, backslash or control character; there is one, at the latest behind the document. */
static inline const uint8_t *next_special(const uint8_t *at) {
#if defined(__SSE2__)
        const __m128i quote = _mm_set1_epi8('"'), slash = _mm_set1_epi8('\\'), control = _mm_set1_epi8(0x1F);
        for (;; at += 16) {
                __m128i found = _mm_loadu_si128((const __m128i *)(const void *)at);
                int bits      = _mm_movemask_epi8(
                        _mm_or_si128(_mm_or_si128(_mm_cmpeq_epi8(found, quote), _mm_cmpeq_epi8(found, slash)),
                                          _mm_cmpeq_epi8(_mm_min_epu8(found, control), found)));
                if (bits)
                        return at + first_bit((uint64_t)bits);
        }
#elif defined(__ARM_NEON) && defined(__aarch64__)
        for (;; at += 16) {
                uint8x16_t found = vld1q_u8(at);
                uint8x16_t hits =
                        vorrq_u8(vorrq_u8(vceqq_u8(found, vdupq_n_u8('"')), vceqq_u8(found, vdupq_n_u8('\\'))),
                                 vcleq_u8(found, vdupq_n_u8(0x1F)));
                uint64_t bits = vget_lane_u64(
                        vreinterpret_u64_u8(vshrn_n_u16(vreinterpretq_u16_u8(hits), 4)), 0); /* 4 for each byte */
                if (bits)
                        return at + (first_bit(bits) >> 2);
        }
#else
        const uint64_t ones = UINT64_C(0x0101010101010101), tops = UINT64_C(0x8080808080808080);
        for (;; at += 8) {
                uint64_t word = load64(at), quote = word ^ ones * '"', slash = word ^ ones * '\\';
                uint64_t bits = (((quote - ones) & ~quote) | ((slash - ones) & ~slash) |
                                 ((word - ones * 0x20) & ~word)) &
                                tops; /* the lowest is right; a borrow makes wrong ones above it only */
                if (bits)
                        return at + (first_bit(bits) >> 3);
        }
#endif
}

KAFKA_EOS_COLD static const uint8_t *past_spaces(const uint8_t *at) {
        for (;;) {
                while (load64(at) == UINT64_C(0x2020202020202020))
                        at += 8;
                if (*at != ' ' && *at != '\n' && *at != '\r' && *at != '\t')
                        return at;
                at++;
        }
}

static inline const uint8_t *past_space(const uint8_t *at) {
        if (LIKELY(*at > ' '))
                return at;
        if (*at == ' ' && at[1] > ' ')
                return at + 1;
        return past_spaces(at);
}

static int hex(uint8_t digit) {
        if (digit >= '0' && digit <= '9')
                return digit - '0';
        digit |= 0x20;
        return digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
}

/*
 * Returns the quote that ends a string, which begins at `at`, behind its first quote. Sets `has_escapes` if there are
 * any. NULL = the string is not well-formed.
 */
static inline const uint8_t *end_of_string(run_t *run, const uint8_t *at, int *has_escapes) {
        for (;;) {
                int digit;
                at = next_special(at);
                if (LIKELY(*at == '"'))
                        return at;
                if (*at != '\\')
                        return broken(run, CONTROL_CHARACTER, at);
                *has_escapes = 1;
                switch (at[1]) {
                case '"':
                case '\\':
                case '/':
                case 'b':
                case 'f':
                case 'n':
                case 'r':
                case 't':
                        at += 2;
                        break;
                case 'u':
                        for (digit = 2; digit < 6; digit++)
                                if (hex(at[digit]) < 0)
                                        return broken(run, ESCAPE, at + digit < run->past ? at : run->past);
                        at += 6;
                        break;
                default:
                        return broken(run, ESCAPE, at + 1 < run->past ? at : run->past);
                }
        }
}

static uint32_t four_digits(const uint8_t *at) {
        return (uint32_t)(hex(at[0]) << 12 | hex(at[1]) << 8 | hex(at[2]) << 4 | hex(at[3]));
}

/*
 * Writes a well-formed string without its escapes, which is never longer. Returns the number of bytes; -1 = it contains
 * half of a surrogate pair.
 */
static int64_t unescape(const uint8_t *at, const uint8_t *past, uint8_t *to) {
        uint8_t *start = to;
        while (at < past) {
                uint32_t code;
                if (*at != '\\') {
                        *to++ = *at++;
                        continue;
                }
                at += 2;
                switch (at[-1]) {
                case 'b':
                        *to++ = '\b';
                        continue;
                case 'f':
                        *to++ = '\f';
                        continue;
                case 'n':
                        *to++ = '\n';
                        continue;
                case 'r':
                        *to++ = '\r';
                        continue;
                case 't':
                        *to++ = '\t';
                        continue;
                case 'u':
                        break;
                default:
                        *to++ = at[-1];
                        continue;
                }
                code = four_digits(at);
                at += 4;
                if (code >= 0xD800 && code <= 0xDFFF) {
                        uint32_t low;
                        if (code >= 0xDC00 || past - at < 6 || at[0] != '\\' || at[1] != 'u')
                                return -1;
                        low = four_digits(at + 2);
                        if (low < 0xDC00 || low > 0xDFFF)
                                return -1;
                        at += 6;
                        code  = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
                        *to++ = (uint8_t)(0xF0 | code >> 18);
                        *to++ = (uint8_t)(0x80 | (code >> 12 & 0x3F));
                        *to++ = (uint8_t)(0x80 | (code >> 6 & 0x3F));
                        *to++ = (uint8_t)(0x80 | (code & 0x3F));
                } else if (code >= 0x800) {
                        *to++ = (uint8_t)(0xE0 | code >> 12);
                        *to++ = (uint8_t)(0x80 | (code >> 6 & 0x3F));
                        *to++ = (uint8_t)(0x80 | (code & 0x3F));
                } else if (code >= 0x80) {
                        *to++ = (uint8_t)(0xC0 | code >> 6);
                        *to++ = (uint8_t)(0x80 | (code & 0x3F));
                } else {
                        *to++ = (uint8_t)code;
                }
        }
        return to - start;
}

/* Returns the end of a number; NULL = it is not well-formed. */
static inline const uint8_t *skip_number(run_t *run, const uint8_t *at) {
        at += *at == '-';
        if (*at == '0')
                at++;
        else if (is_digit(*at))
                do
                        at++;
                while (is_digit(*at));
        else
                return broken(run, NUMBER, at);
        if (*at == '.') {
                if (!is_digit(*++at))
                        return broken(run, NUMBER, at);
                do
                        at++;
                while (is_digit(*at));
        }
        if ((*at | 0x20) == 'e') {
                at++;
                at += *at == '+' || *at == '-';
                if (!is_digit(*at))
                        return broken(run, NUMBER, at);
                do
                        at++;
                while (is_digit(*at));
        }
        return at;
}

/* Returns the end of a value that is neither an object nor an array; NULL = it is not well-formed. */
static inline const uint8_t *skip_scalar(run_t *run, const uint8_t *at) {
        int has_escapes = 0;
        switch (*at) {
        case '"':
                at = end_of_string(run, at + 1, &has_escapes);
                return at ? at + 1 : NULL;
        case '-':
        case '0':
        case '1':
        case '2':
        case '3':
        case '4':
        case '5':
        case '6':
        case '7':
        case '8':
        case '9':
                return skip_number(run, at);
        case 't':
                return is_word(at, "true", 4) ? at + 4 : broken(run, NO_VALUE, at);
        case 'f':
                return is_word(at, "false", 5) ? at + 5 : broken(run, NO_VALUE, at);
        case 'n':
                return is_word(at, "null", 4) ? at + 4 : broken(run, NO_VALUE, at);
        default:
                return broken(run, NO_VALUE, at);
        }
}

/* Returns the end of an object or an array with everything in it. */
static const uint8_t *skip_container(run_t *run, const uint8_t *at) {
        uint8_t is_object[MOST_LEVELS + 1];
        int64_t depth = run->depth, outside = depth;
        int has_escapes = 0;

        for (;;) { /* `at` is at the beginning of a value */
                if (*at == '{' || *at == '[') {
                        if (++depth > MOST_LEVELS)
                                return broken(run, TOO_DEEP, at);
                        is_object[depth] = *at == '{';
                        at               = past_space(at + 1);
                        if (*at != (is_object[depth] ? '}' : ']')) {
                                if (!is_object[depth])
                                        continue;
                                goto name;
                        }
                } else {
                        at = skip_scalar(run, at);
                        if (!at)
                                return NULL;
                        at = past_space(at);
                }
                while (*at == (is_object[depth] ? '}' : ']')) {
                        at++;
                        if (--depth == outside)
                                return at;
                        at = past_space(at);
                }
                if (*at != ',')
                        return broken(run, is_object[depth] ? END_OF_FIELD : END_OF_ITEM, at);
                at = past_space(at + 1);
                if (!is_object[depth])
                        continue;
        name:
                if (*at != '"')
                        return broken(run, NAME, at);
                at = end_of_string(run, at + 1, &has_escapes);
                if (!at)
                        return NULL;
                at = past_space(at + 1);
                if (*at != ':')
                        return broken(run, COLON, at);
                at = past_space(at + 1);
        }
}

static inline const uint8_t *skip_value(run_t *run, const uint8_t *at) {
        return *at == '{' || *at == '[' ? skip_container(run, at) : skip_scalar(run, at);
}

/* ---- columns ---------------------------------------------------------------------------------------------- */

static int64_t bytes_of_values(int64_t op, int64_t rows) {
        if (op == OP_BOOLEAN)
                return (rows + 7) >> 3;
        return (rows + has_offsets(op)) * WIDTHS[op];
}

static int enlarge(run_t *run, part_t *part, int64_t bytes) {
        uint8_t *at;
        if (bytes <= part->capacity)
                return 1;
        if (!charge(&run->allowance, bytes - part->capacity))
                return 0;
        at = part->at ? realloc(part->at, (size_t)bytes) : calloc(1, (size_t)bytes);
        if (!at)
                return 0;
        if (part->at)
                memset(at + part->capacity, 0, (size_t)(bytes - part->capacity));
        part->at       = at;
        part->capacity = bytes;
        return 1;
}

/* Makes room for rows of a column, and of the columns inside a struct. Returns 0 after `no_room`. */
KAFKA_EOS_COLD static int grow_rows(run_t *run, int64_t index, int64_t rows) {
        const node_t *node = &run->nodes[index];
        column_t *column   = &run->columns[index];
        int64_t child;

        if (rows <= column->capacity)
                return 1;
        if (!enlarge(run, &column->validity, (rows + 7) >> 3) ||
            !enlarge(run, &column->values, bytes_of_values(node->op, rows)))
                return no_room(run) != NULL;
        if (node->op == OP_STRUCT)
                for (child = 0; child < node->count; child++)
                        if (!grow_rows(run, node->first + child, rows))
                                return 0;
        column->capacity = rows;
        return 1;
}

static inline int64_t offset_at(const column_t *column, int64_t row) {
        int32_t offset;
        memcpy(&offset, column->values.at + row * 4, 4);
        return offset;
}

static inline void set_offset(column_t *column, int64_t row, int64_t offset) {
        int32_t narrow = (int32_t)offset;
        memcpy(column->values.at + row * 4, &narrow, 4);
}

/* Makes the rows up to `rows` null. There must be room for them. */
static void fill(const node_t *node, column_t *column, int64_t rows) {
        if (has_offsets(node->op)) {
                int64_t offset = offset_at(column, column->rows), row;
                for (row = column->rows + 1; row <= rows; row++)
                        set_offset(column, row, offset);
        }
        column->rows = rows;
}

/* Takes back all rows from `rows` on, and what a value of the row `rows` has begun. */
static void truncate_rows(run_t *run, int64_t index, int64_t rows) {
        const node_t *node = &run->nodes[index];
        column_t *column   = &run->columns[index];
        int64_t child;

        if (node->op == OP_STRUCT) {
                for (child = 0; child < node->count; child++)
                        truncate_rows(run, node->first + child, rows);
        } else if (column->rows >= rows) {
                if (has_heap(node->op))
                        column->heap.bytes = offset_at(column, rows);
                else if (has_offsets(node->op))
                        for (child = 0; child < node->count; child++)
                                truncate_rows(run, node->first + child, offset_at(column, rows));
        }
        if (column->rows > rows) {
                int64_t bytes = (rows + 7) >> 3, used = (column->rows + 7) >> 3;
                if (rows & 7)
                        column->validity.at[rows >> 3] &= (uint8_t)((1u << (rows & 7)) - 1);
                memset(column->validity.at + bytes, 0, (size_t)(used - bytes));
                column->rows = rows;
        }
}

/* Prepares a column for the value of a row: of two fields with the same name, the last one counts. */
static inline int begin(run_t *run, int64_t index, int64_t row) {
        column_t *column = &run->columns[index];
        if (UNLIKELY(row >= column->capacity)) {
                int64_t rows = row < 32 ? 64 : 2 * row;
                if (row >= KAFKA_EOS_LARGEST_OFFSET)
                        return stop(run) != NULL;
                if (!grow_rows(run, index, rows))
                        return 0;
        }
        if (column->rows < row)
                fill(&run->nodes[index], column, row);
        else if (UNLIKELY(column->rows > row))
                truncate_rows(run, index, row);
        return 1;
}

static inline void end(column_t *column, int64_t row) {
        column->validity.at[row >> 3] |= (uint8_t)(1u << (row & 7));
        column->rows = row + 1;
}

/* Makes room in the heap of a column of strings. */
static inline int make_room(run_t *run, column_t *column, int64_t bytes) {
        if (UNLIKELY(bytes > KAFKA_EOS_LARGEST_OFFSET - column->heap.bytes))
                return stop(run) != NULL;
        return reserve_within(&column->heap, bytes + 16, &run->allowance) || no_room(run) != NULL;
}

/* Ends a row whose bytes are in the heap already. */
static inline void end_text(column_t *column, int64_t row, int64_t bytes) {
        column->heap.bytes += bytes;
        set_offset(column, row + 1, column->heap.bytes);
        end(column, row);
}

/* ---- values ------------------------------------------------------------------------------------------------ */

/*
 * Reads a string that begins at `at`, behind its quote, without its escapes. Returns what is behind it; NULL = it is
 * not well-formed, or does not fit `index`.
 */
static const uint8_t *read_text(run_t *run, int64_t index, const uint8_t *at, text_t *text) {
        int has_escapes    = 0;
        const uint8_t *end = end_of_string(run, at, &has_escapes);
        int64_t bytes;
        if (!end)
                return NULL;
        text->at   = at;
        text->past = end;
        if (has_escapes) {
                run->text.bytes = 0;
                if (!reserve_within(&run->text, end - at + 16, NULL)) /* at most a copy of the document */
                        return no_room(run);
                bytes = unescape(at, end, run->text.at);
                if (bytes < 0)
                        return misfit(run, SURROGATE, index, at - 1);
                text->at   = run->text.at;
                text->past = run->text.at + bytes;
        }
        return end + 1;
}

/* Appends a string that begins at `at`, behind its quote. Returns what is behind it. */
static inline const uint8_t *append_string(run_t *run, int64_t index, const uint8_t *at, int64_t row) {
        column_t *column   = &run->columns[index];
        int has_escapes    = 0;
        const uint8_t *end = end_of_string(run, at, &has_escapes);
        int64_t bytes;

        if (!end)
                return NULL;
        bytes = end - at;
        if (!make_room(run, column, bytes))
                return NULL;
        if (UNLIKELY(has_escapes)) {
                bytes = unescape(at, end, column->heap.at + column->heap.bytes);
                if (bytes < 0)
                        return misfit(run, SURROGATE, index, at - 1);
        } else if (bytes <= 16) {
                memcpy(column->heap.at + column->heap.bytes, at, 16);
        } else {
                memcpy(column->heap.at + column->heap.bytes, at, (size_t)bytes);
        }
        end_text(column, row, bytes);
        return end + 1;
}

static const uint8_t *decode_number(run_t *run, int64_t index, const uint8_t *at, int64_t row) {
        const node_t *node = &run->nodes[index];
        column_t *column   = &run->columns[index];
        number_t number;
        const uint8_t *past;
        uint8_t *to;

        if (UNLIKELY(*at != '-' && !is_digit(*at)))
                return misfit(run, MISFIT, index, at);
        past = read_number(at, &number);
        if (UNLIKELY(!past))
                return broken(run, NUMBER, number.digits);
        if (UNLIKELY(past - at > LONGEST_NUMBER))
                return misfit(run, LONG_NUMBER, index, at);
        if (number.is_integer && number.mantissa == 0 && number.is_exact)
                number.is_negative = 0; /* -0 is an integer without a sign, but -0.0 has one */
        to = column->values.at + row * WIDTHS[node->op];
        switch (node->op) {
        case OP_FLOAT: {
                float value;
                if (!to_float(run->input->powers, &number, &value))
                        return misfit(run, MISFIT, index, at);
                memcpy(to, &value, 4);
                break;
        }
        case OP_DOUBLE: {
                double value;
                if (!to_double(run->input->powers, &number, &value))
                        return misfit(run, MISFIT, index, at);
                memcpy(to, &value, 8);
                break;
        }
        case OP_DECIMAL: {
                wide_t value;
                if (!to_decimal(&number, node->a, node->b, &value))
                        return misfit(run, MISFIT, index, at);
                memcpy(to, &value, 16);
                break;
        }
        default: { /* an integer; `a` is the largest */
                uint64_t most = (uint64_t)node->a + (uint64_t)number.is_negative, bits;
                if (UNLIKELY(!number.is_integer || !number.is_exact || number.mantissa > most))
                        return misfit(run, MISFIT, index, at);
                bits = number.is_negative ? ~number.mantissa + 1 : number.mantissa;
                if (node->op == OP_TIMESTAMP) /* seconds */
                        bits *= 1000000;
                switch (WIDTHS[node->op]) {
                case 1:
                        memcpy(to, &bits, 1);
                        break;
                case 2:
                        memcpy(to, &bits, 2);
                        break;
                case 4:
                        memcpy(to, &bits, 4);
                        break;
                default:
                        memcpy(to, &bits, 8);
                }
        }
        }
        end(column, row);
        return past;
}

/* Reads the numbers that only a string can be: NaN and the infinities. Returns whether it is one. */
static int is_special(text_t text, double *value) {
        static const struct {
                const char *name;
                int sign;
        } NAMES[] = {{"NaN", 0},       {"+INF", 1},  {"+Infinity", 1},
                     {"Infinity", 1}, {"-INF", -1}, {"-Infinity", -1}};
        size_t each, bytes = (size_t)(text.past - text.at);
        for (each = 0; each < sizeof(NAMES) / sizeof(NAMES[0]); each++)
                if (strlen(NAMES[each].name) == bytes && is_word(text.at, NAMES[each].name, bytes)) {
                        uint64_t bits = UINT64_C(0x7FF0000000000000) | (NAMES[each].sign < 0 ? UINT64_C(1) << 63 : 0) |
                                        (NAMES[each].sign == 0 ? UINT64_C(1) << 51 : 0);
                        memcpy(value, &bits, 8);
                        return 1;
                }
        return 0;
}

/* Reads the number that a string contains, as Java's BigDecimal, but commas are left out. Returns 0 if it is none. */
static int decimal_text(run_t *run, text_t text, number_t *number) {
        uint8_t *to;
        const uint8_t *at, *past;
        int64_t exponent = 0, fraction = 0, digits = 0;
        int is_negative, has_point = 0;

        if (text.past - text.at > LONGEST_NUMBER)
                return 0;
        run->second.bytes = 0;
        if (!reserve_within(&run->second, text.past - text.at + 8, NULL))
                return no_room(run) != NULL;
        to = run->second.at;
        for (at = text.at; at < text.past; at++)
                if (*at != ',')
                        *to++ = *at;
        past = to;
        *to  = 0;
        at   = run->second.at;
        number->is_negative = *at == '-';
        at += *at == '-' || *at == '+';
        number->digits = at;
        for (; is_digit(*at) || (*at == '.' && !has_point); at++) {
                digits += *at != '.';
                fraction += has_point;
                has_point |= *at == '.';
        }
        number->past_digits = at;
        if (digits == 0)
                return 0;
        if ((*at | 0x20) == 'e') {
                at++;
                is_negative = *at == '-';
                at += *at == '-' || *at == '+';
                if (!is_digit(*at))
                        return 0;
                for (; is_digit(*at); at++)
                        if (exponent < 1000000)
                                exponent = exponent * 10 + (*at - '0');
                if (is_negative)
                        exponent = -exponent;
        }
        number->exponent = exponent - fraction;
        return at == past;
}

/* Decodes a value that only a string can be, and numbers as strings. */
static const uint8_t *decode_text(run_t *run, int64_t index, const uint8_t *at, int64_t row) {
        const node_t *node = &run->nodes[index];
        column_t *column   = &run->columns[index];
        uint8_t *to        = column->values.at + row * WIDTHS[node->op];
        const uint8_t *past;
        text_t text;

        if (UNLIKELY(*at != '"'))
                return misfit(run, MISFIT, index, at);
        past = read_text(run, index, at + 1, &text);
        if (UNLIKELY(!past))
                return NULL;
        switch (node->op) {
        case OP_FLOAT:
        case OP_DOUBLE: {
                double value;
                float narrow;
                if (!is_special(text, &value))
                        return misfit(run, MISFIT, index, at);
                narrow = (float)value;
                if (node->op == OP_FLOAT)
                        memcpy(to, &narrow, 4);
                else
                        memcpy(to, &value, 8);
                break;
        }
        case OP_DECIMAL: {
                number_t number;
                wide_t value;
                int is_number = decimal_text(run, text, &number);
                if (run->status)
                        return NULL;
                if (!is_number || !to_decimal(&number, node->a, node->b, &value))
                        return misfit(run, MISFIT, index, at);
                memcpy(to, &value, 16);
                break;
        }
        case OP_BINARY: {
                int64_t bytes;
                if (!make_room(run, column, (text.past - text.at) / 4 * 3))
                        return NULL;
                bytes = from_base64(text, column->heap.at + column->heap.bytes);
                if (bytes < 0)
                        return misfit(run, MISFIT, index, at);
                end_text(column, row, bytes);
                return past;
        }
        case OP_DATE: {
                int32_t days;
                if (!to_date(text, &days))
                        return misfit(run, MISFIT, index, at);
                memcpy(to, &days, 4);
                break;
        }
        default: {
                int64_t micros;
                if (!to_timestamp(text, node->op == OP_TIMESTAMP ? &run->input->zone : NULL, &micros))
                        return misfit(run, MISFIT, index, at);
                memcpy(to, &micros, 8);
        }
        }
        end(column, row);
        return past;
}

static const uint8_t *decode_value(run_t *run, int64_t index, const uint8_t *at, int64_t row);

/* Reads the items of an array, behind its bracket. */
static const uint8_t *decode_array(run_t *run, int64_t index, const uint8_t *at, int64_t row) {
        column_t *column = &run->columns[index];
        int64_t child    = run->nodes[index].first;
        column_t *items  = &run->columns[child];

        if (++run->depth > MOST_LEVELS)
                return broken(run, TOO_DEEP, at - 1);
        at = past_space(at);
        if (*at != ']')
                for (;;) {
                        int64_t item = items->rows;
                        at           = decode_value(run, child, at, item);
                        if (!at)
                                return NULL;
                        if (items->rows == item) /* null */
                                fill(&run->nodes[child], items, item + 1);
                        at = past_space(at);
                        if (*at == ']')
                                break;
                        if (*at != ',')
                                return broken(run, END_OF_ITEM, at);
                        at = past_space(at + 1);
                }
        run->depth--;
        set_offset(column, row + 1, items->rows);
        end(column, row);
        return at + 1;
}

typedef struct {
        const uint8_t *at;
        int64_t bytes;
} map_key_t;

static int compare_keys(const void *left, const void *right) {
        const map_key_t *a = left, *b = right;
        if (a->bytes != b->bytes)
                return a->bytes < b->bytes ? -1 : 1;
        return memcmp(a->at, b->at, (size_t)a->bytes);
}

/* Returns whether a key occurs twice among those from `first` on; -1 = there is not enough memory. */
static int has_repeated_key(run_t *run, const column_t *keys, int64_t first) {
        int64_t count = keys->rows - first, one, other;
        map_key_t *found;

        if (count <= 8) {
                for (one = first + 1; one < keys->rows; one++)
                        for (other = first; other < one; other++) {
                                int64_t bytes = offset_at(keys, one + 1) - offset_at(keys, one);
                                if (offset_at(keys, other + 1) - offset_at(keys, other) == bytes &&
                                    memcmp(keys->heap.at + offset_at(keys, one), keys->heap.at + offset_at(keys, other),
                                           (size_t)bytes) == 0)
                                        return 1;
                        }
                return 0;
        }
        run->keys.bytes = 0;
        if (!reserve_within(&run->keys, count * (int64_t)sizeof(map_key_t), NULL))
                return -1;
        found = (map_key_t *)(void *)run->keys.at;
        for (one = 0; one < count; one++) {
                found[one].at    = keys->heap.at + offset_at(keys, first + one);
                found[one].bytes = offset_at(keys, first + one + 1) - offset_at(keys, first + one);
        }
        qsort(found, (size_t)count, sizeof(map_key_t), compare_keys);
        for (one = 1; one < count; one++)
                if (compare_keys(&found[one - 1], &found[one]) == 0)
                        return 1;
        return 0;
}

/* Reads the fields of an object, behind its brace, as the entries of a map. */
static const uint8_t *decode_map(run_t *run, int64_t index, const uint8_t *at, int64_t row) {
        column_t *column = &run->columns[index];
        int64_t first    = run->nodes[index].first, start;
        column_t *keys = &run->columns[first], *items = &run->columns[first + 1];
        const uint8_t *object = at - 1;

        if (++run->depth > MOST_LEVELS)
                return broken(run, TOO_DEEP, at - 1);
        start = keys->rows;
        at    = past_space(at);
        if (*at != '}')
                for (;;) {
                        int64_t entry = keys->rows;
                        if (*at != '"')
                                return broken(run, NAME, at);
                        if (!begin(run, first, entry))
                                return NULL;
                        at = append_string(run, first, at + 1, entry);
                        if (!at)
                                return NULL;
                        at = past_space(at);
                        if (*at != ':')
                                return broken(run, COLON, at);
                        at = decode_value(run, first + 1, past_space(at + 1), entry);
                        if (!at)
                                return NULL;
                        if (items->rows == entry)
                                fill(&run->nodes[first + 1], items, entry + 1);
                        at = past_space(at);
                        if (*at == '}')
                                break;
                        if (*at != ',')
                                return broken(run, END_OF_FIELD, at);
                        at = past_space(at + 1);
                }
        run->depth--;
        switch (has_repeated_key(run, keys, start)) {
        case 0:
                break;
        case 1:
                return misfit(run, REPEATED_KEY, index, object);
        default:
                return no_room(run);
        }
        set_offset(column, row + 1, keys->rows);
        end(column, row);
        return at + 1;
}

/* Returns a hash of a name; eight bytes behind it must be readable. */
static inline uint64_t hash_of(const uint8_t *at, int64_t bytes) {
        uint64_t hash = (uint64_t)bytes * UINT64_C(0x9E3779B97F4A7C15), word;
        for (; bytes > 8; at += 8, bytes -= 8) {
                hash = (hash ^ load64(at)) * UINT64_C(0xD6E8FEB86659FD93);
                hash ^= hash >> 32;
        }
        word = bytes ? load64(at) & (UINT64_MAX >> (64 - 8 * bytes)) : 0;
        hash = (hash ^ word) * UINT64_C(0xD6E8FEB86659FD93);
        return hash ^ hash >> 32;
}

static inline int64_t find_name(run_t *run, const table_t *table, const uint8_t *at, int64_t bytes) {
        uint64_t hash = hash_of(at, bytes), slot;
        for (slot = hash >> table->shift;; slot++) {
                const slot_t *found = &table->slots[slot & table->mask];
                if (found->child < 0)
                        return -1;
                if (found->hash == hash) {
                        const node_t *node = &run->nodes[found->child];
                        if (node->bytes == bytes && memcmp(run->input->names + node->name, at, (size_t)bytes) == 0)
                                return found->child;
                }
        }
}

KAFKA_EOS_COLD static int64_t find_escaped(run_t *run, const table_t *table, const uint8_t *at, const uint8_t *past) {
        int64_t bytes;
        run->text.bytes = 0;
        if (!reserve_within(&run->text, past - at + 16, NULL)) {
                no_room(run);
                return -1;
        }
        bytes = unescape(at, past, run->text.at);
        return bytes < 0 ? -1 : find_name(run, table, run->text.at, bytes);
}

static inline int is_expected(const expected_t *expected, int64_t index, const uint8_t *at) {
        uint64_t differences = 0;
        int word;
        for (word = 0; word < EXPECTED_WORDS; word++)
                differences |= (load64(at + 8 * word) ^ expected->words[word]) & expected->masks[word];
        return differences == 0 && expected->owner == index + 1;
}

/* Reads a name that was not expected, and the colon. Returns what is behind it; NULL = it is not well-formed. */
static const uint8_t *read_name(run_t *run, int64_t index, const table_t *table, const uint8_t *at, int64_t *child,
                                expected_t *expected) {
        const uint8_t *start = at, *end;
        int has_escapes      = 0;
        int64_t word;

        if (UNLIKELY(*at != '"'))
                return broken(run, NAME, at);
        end = end_of_string(run, at + 1, &has_escapes);
        if (!end)
                return NULL;
        if (LIKELY(!has_escapes))
                *child = find_name(run, table, at + 1, end - at - 1);
        else
                *child = find_escaped(run, table, at + 1, end);
        at = past_space(end + 1);
        if (UNLIKELY(*at != ':'))
                return broken(run, COLON, at);
        at++;
        if (!has_escapes && at - start <= 8 * EXPECTED_WORDS) {
                for (word = 0; word < EXPECTED_WORDS; word++) {
                        int64_t used           = at - start - 8 * word;
                        expected->words[word] = load64(start + 8 * word);
                        expected->masks[word] = used >= 8  ? UINT64_MAX
                                                : used > 0 ? UINT64_MAX >> (64 - 8 * used)
                                                           : 0;
                }
                expected->owner = index + 1;
                expected->child = *child;
                expected->bytes = at - start;
        }
        return at;
}

static const uint8_t *after_misfit(run_t *run, int64_t index, const uint8_t *at, int64_t row, int64_t depth);

/* Reads the fields of an object, behind its brace, as those of a struct. */
static const uint8_t *decode_struct(run_t *run, int64_t index, const uint8_t *at, int64_t row) {
        const table_t *table = &run->tables[index];
        int64_t depth        = ++run->depth;
        uint64_t place       = (uint64_t)index * 37; /* of the next name among those that are expected */

        if (depth > MOST_LEVELS)
                return broken(run, TOO_DEEP, at - 1);
        at = past_space(at);
        if (*at != '}')
                for (;;) {
                        expected_t *expected = &run->expected[place++ & (EXPECTED_NAMES - 1)];
                        const uint8_t *behind;
                        int64_t child = -1;
                        if (LIKELY(is_expected(expected, index, at))) {
                                child = expected->child;
                                at += expected->bytes;
                        } else {
                                at = read_name(run, index, table, at, &child, expected);
                                if (UNLIKELY(!at))
                                        return NULL;
                        }
                        at     = past_space(at);
                        behind = child < 0 ? skip_value(run, at) : decode_value(run, child, at, row);
                        if (UNLIKELY(!behind)) {
                                behind = child < 0 ? NULL : after_misfit(run, child, at, row, depth);
                                if (!behind)
                                        return NULL;
                        }
                        at = past_space(behind);
                        if (*at == ',') {
                                at = past_space(at + 1);
                                continue;
                        }
                        if (LIKELY(*at == '}'))
                                break;
                        return broken(run, END_OF_FIELD, at);
                }
        run->depth--;
        end(&run->columns[index], row);
        return at + 1;
}

/* Decodes one value into its column. Returns what is behind it; NULL = it failed, and `run` says why. */
static const uint8_t *decode_value(run_t *run, int64_t index, const uint8_t *at, int64_t row) {
        const node_t *node = &run->nodes[index];
        column_t *column   = &run->columns[index];

        if (UNLIKELY(!begin(run, index, row)))
                return NULL;
        if (*at == 'n')
                return is_word(at, "null", 4) ? at + 4 : misfit(run, MISFIT, index, at);
        switch (node->op) {
        case OP_BOOLEAN: {
                int is_true  = is_word(at, "true", 4);
                uint8_t mask = (uint8_t)(1u << (row & 7)), *byte = &column->values.at[row >> 3];
                if (!is_true && !is_word(at, "false", 5))
                        return misfit(run, MISFIT, index, at);
                *byte = (uint8_t)((*byte & ~mask) | (is_true ? mask : 0));
                end(column, row);
                return at + (is_true ? 4 : 5);
        }
        case OP_STRING: {
                const uint8_t *past;
                if (LIKELY(*at == '"'))
                        return append_string(run, index, at + 1, row);
                past = skip_value(run, at); /* any other value is the text that it was written with */
                if (!past || !make_room(run, column, past - at))
                        return NULL;
                memcpy(column->heap.at + column->heap.bytes, at, (size_t)(past - at));
                end_text(column, row, past - at);
                return past;
        }
        case OP_FLOAT:
        case OP_DOUBLE:
        case OP_DECIMAL:
        case OP_TIMESTAMP:
                if (*at == '"')
                        return decode_text(run, index, at, row);
                return decode_number(run, index, at, row);
        case OP_BINARY:
        case OP_DATE:
        case OP_TIMESTAMP_NTZ:
                return decode_text(run, index, at, row);
        case OP_STRUCT:
                return *at == '{' ? decode_struct(run, index, at + 1, row) : misfit(run, MISFIT, index, at);
        case OP_ARRAY:
                return *at == '[' ? decode_array(run, index, at + 1, row) : misfit(run, MISFIT, index, at);
        case OP_MAP:
                return *at == '{' ? decode_map(run, index, at + 1, row) : misfit(run, MISFIT, index, at);
        default:
                return decode_number(run, index, at, row);
        }
}

/* ---- rows --------------------------------------------------------------------------------------------------- */

/* Records why the row failed. Returns 0 after `no_room`. */
static int note(run_t *run) {
        error_t error = {0};
        const uint8_t *past;
        int64_t shown;

        if (run->code < EMPTY) { /* the value must at least be well-formed */
                int64_t code = run->code, node = run->node;
                const uint8_t *at = run->failed_at;
                past              = skip_value(run, at);
                if (past) {
                        error.bytes    = past - at;
                        run->code      = code;
                        run->node      = node;
                        run->failed_at = at;
                }
        }
        error.row  = run->row;
        error.node = run->node;
        error.code = run->code;
        error.at   = run->failed_at - run->document.at;
        if (run->code >= EMPTY)
                error.bytes = run->past - run->failed_at;
        shown = error.bytes < QUOTED_BYTES ? error.bytes : QUOTED_BYTES;
        if (shown > 0)
                memcpy(error.text, run->failed_at, (size_t)shown);
        return append_within(run->errors, &error, sizeof(error), &run->allowance) || no_room(run) != NULL;
}

/* Makes a field null whose value begins at `at` and did not fit. Returns what is behind it; NULL = the row fails. */
KAFKA_EOS_COLD static const uint8_t *after_misfit(run_t *run, int64_t index, const uint8_t *at, int64_t row,
                                                  int64_t depth) {
        if (run->status || run->code >= EMPTY || !run->input->is_partial)
                return NULL;
        if (run->noted_row != run->row) { /* the first one is enough */
                if (!note(run) || run->code >= EMPTY)
                        return NULL;
                run->noted_row = run->row;
        }
        run->depth = depth;
        truncate_rows(run, index, row);
        return skip_value(run, at);
}

/* Copies a document to memory of the call, with zero bytes behind it. Returns 0 if it is not UTF-8, or no memory. */
static int copy_document(run_t *run, const uint8_t *from, int64_t bytes) {
        uint8_t *to;
        uint64_t all = 0;
        int64_t at   = 0;

        run->document.bytes = 0;
        if (!reserve_within(&run->document, bytes + PADDING, NULL))
                return no_room(run) != NULL;
        to        = run->document.at;
        run->past = to + bytes;
        for (; at + 32 <= bytes; at += 32) {
                uint64_t words[4];
                memcpy(words, from + at, 32);
                all |= words[0] | words[1] | words[2] | words[3];
                memcpy(to + at, words, 32);
        }
        for (; at + 8 <= bytes; at += 8) {
                uint64_t word = load64(from + at);
                all |= word;
                memcpy(to + at, &word, 8);
        }
        for (; at < bytes; at++) {
                all |= from[at];
                to[at] = from[at];
        }
        memset(to + bytes, 0, PADDING);
        if (UNLIKELY(all & UINT64_C(0x8080808080808080)) && !is_utf8(to, bytes)) {
                broken(run, UTF8, to);
                return 0;
        }
        return 1;
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

/* Decodes a document. Returns 0 if it failed. */
static int decode_row(run_t *run, int64_t row) {
        int64_t first = input_offset(run->input, row);
        const uint8_t *at;

        run->row   = row;
        run->depth = 0;
        if (!copy_document(run, run->input->data + first, input_offset(run->input, row + 1) - first))
                return 0;
        at = past_space(run->document.at);
        if (at == run->past)
                return broken(run, EMPTY, at) != NULL;
        if (*at != '{')
                return skip_value(run, at) && broken(run, NO_OBJECT, at);
        at = decode_struct(run, 0, at + 1, row);
        if (!at)
                return 0;
        at = past_space(at);
        return at == run->past || broken(run, TRAILING, at);
}

/* Builds the hash tables of the names. Returns 0 if there is not enough memory. */
static int make_tables(run_t *run) {
        const input_t *input = run->input;
        int64_t index, slots = 0, child;
        slot_t *next;

        run->tables = calloc((size_t)input->node_count, sizeof(table_t));
        if (!run->tables)
                return 0;
        for (index = 0; index < input->node_count; index++)
                if (run->nodes[index].op == OP_STRUCT) {
                        int64_t bits = 1;
                        while (INT64_C(1) << bits < 3 * run->nodes[index].count)
                                bits++;
                        run->tables[index].shift = (int)(64 - bits);
                        run->tables[index].mask  = (UINT64_C(1) << bits) - 1;
                        slots += INT64_C(1) << bits;
                }
        run->slots = malloc((size_t)slots * sizeof(slot_t));
        if (!run->slots)
                return 0;
        for (index = 0; index < slots; index++)
                run->slots[index].child = -1;
        next = run->slots;
        for (index = 0; index < input->node_count; index++) {
                const node_t *node = &run->nodes[index];
                table_t *table     = &run->tables[index];
                if (node->op != OP_STRUCT)
                        continue;
                table->slots = next;
                next += table->mask + 1;
                for (child = node->first; child < node->first + node->count; child++) {
                        const node_t *named = &run->nodes[child];
                        uint64_t hash       = hash_of(input->names + named->name, named->bytes);
                        uint64_t slot       = hash >> table->shift;
                        while (table->slots[slot & table->mask].child >= 0)
                                slot++;
                        table->slots[slot & table->mask].hash  = hash;
                        table->slots[slot & table->mask].child = child;
                }
        }
        return 1;
}

/* Returns the bits that a row takes in the columns that have one value for each row. */
static int64_t bits_of_row(const node_t *nodes, int64_t index) {
        const node_t *node = &nodes[index];
        int64_t child, bits = 1 + (node->op == OP_BOOLEAN ? 1 : 8 * WIDTHS[node->op]);
        if (node->op == OP_STRUCT)
                for (child = 0; child < node->count; child++)
                        bits += bits_of_row(nodes, node->first + child);
        return bits;
}

/* Gives all columns their rows: those behind the last value are null. */
static void finish(run_t *run, int64_t index, int64_t rows) {
        const node_t *node = &run->nodes[index];
        column_t *column   = &run->columns[index];
        int64_t child, inside;

        fill(node, column, rows);
        column->validity.bytes = (rows + 7) >> 3;
        column->values.bytes   = bytes_of_values(node->op, rows);
        if (node->op != OP_STRUCT && node->op != OP_ARRAY && node->op != OP_MAP)
                return;
        inside = node->op == OP_STRUCT ? rows : offset_at(column, rows);
        for (child = 0; child < node->count; child++)
                finish(run, node->first + child, inside);
}

/* Decodes the documents, and returns how many rows there are then. */
static int64_t decode_rows(run_t *run, int64_t most) {
        int64_t row;
        for (row = 0; row < most; row++) {
                int64_t place            = run->input->offset + row;
                const uint8_t *validity = run->input->validity;
                if (validity && !(validity[place >> 3] >> (place & 7) & 1))
                        continue;
                if (decode_row(run, row))
                        continue;
                if (run->status || !note(run))
                        break;
                truncate_rows(run, 0, row);
                if (run->input->is_partial)
                        end(&run->columns[0], row); /* a row of nulls */
        }
        return row;
}

/*
 * Decodes the documents of `input`. Returns NULL if there is not enough memory for the block itself. Otherwise the
 * caller frees the block with kafka_eos_json_free. A row that does not decode is null, with an entry in `errors`;
 * if the call is partial, only what does not fit is null. If the call stops before the first row, the columns are
 * unusable. A row has two entries in `errors` if a value does not fit and the document is broken; the last one counts.
 */
EXPORT block_t *kafka_eos_json_decode(const input_t *input) {
        block_t *block = calloc(1, sizeof(block_t) + (size_t)input->node_count * sizeof(column_t));
        run_t run      = {.input = input, .nodes = input->nodes};
        int64_t index, rows = input->rows, fitting;

        if (!block)
                return NULL;
        block->column_count = input->node_count;
        run.columns         = block->columns;
        run.errors          = &block->errors;
        run.allowance.left  = input->most_bytes;
        run.noted_row       = -1;
        run.expected        = calloc(EXPECTED_NAMES, sizeof(expected_t));
        fitting             = input->most_bytes / 2 / (bits_of_row(input->nodes, 0) / 8 + 1);
        if (rows > fitting)
                rows = fitting > 0 ? fitting : 1;
        if (!run.expected || !make_tables(&run))
                run.status = NO_MEMORY;
        else if (grow_rows(&run, 0, rows > 0 ? rows : 1))
                for (index = 0; index < input->node_count && grow_rows(&run, index, 8); index++)
                        ;
        if (!run.status) {
                block->rows = decode_rows(&run, rows);
                if (run.status == STOPPED)
                        truncate_rows(&run, 0, block->rows);
                if (run.status != NO_MEMORY)
                        finish(&run, 0, block->rows);
        }
        block->status = run.status;
        free(run.document.at);
        free(run.text.at);
        free(run.second.at);
        free(run.keys.at);
        free(run.expected);
        free(run.tables);
        free(run.slots);
        return block;
}

EXPORT void kafka_eos_json_free(block_t *block) {
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
