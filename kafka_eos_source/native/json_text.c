/*
 * Writes the values of Arrow arrays as JSON documents, or as text, byte for byte as Spark writes them.
 *
 * Python (documents/encode.py) compiles a schema into a program: a tree of nodes in one flat array. The functions
 * below interpret the program for each row. The program is trusted, because Python wrote it, and so is the structure
 * of the arrays. The bytes of strings are not: bytes that are not UTF-8 become U+FFFD, as in Java. A call stops
 * before the row with which its text would take more memory than the caller allows.
 *
 * This is a plain shared library that links against nothing, like kernel.c. It has no state, and does not depend on
 * the locale. Callers must release Python's GIL, which ctypes does. documents/encode.py declares the structs and
 * functions. If you change one, change KAFKA_EOS_JSON_TEXT_VERSION here and VERSIONS in __init__.py.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "buffers.h"

#define KAFKA_EOS_JSON_TEXT_VERSION 1

EXPORT int32_t kafka_eos_json_text_version(void) { return KAFKA_EOS_JSON_TEXT_VERSION; }

typedef unsigned __int128 wide_t;

/* What a node writes. documents/encode.py describes the operands. */
enum {
        WRITE_NULL = 0,
        WRITE_BOOLEAN,
        WRITE_INTEGER,
        WRITE_FLOAT,
        WRITE_DOUBLE,
        WRITE_DECIMAL,
        WRITE_STRING,
        WRITE_BINARY,
        WRITE_DATE,
        WRITE_TIMESTAMP,
        WRITE_STRUCT,
        WRITE_LIST,
        WRITE_MAP
};

/* Which values are put between quotes. */
enum { BARE = 0, JSON, KEY }; /* none; values that are strings in JSON; all, because the value is a map's key */

typedef struct {
        int64_t op, quotes;
        int64_t array;       /* number of its array in a depth-first walk */
        int64_t first, size; /* children in `links` */
        int64_t a, b;
        int64_t name, name_bytes; /* comma, name and colon before a field, in `text` */
} node_t;

/* The input of a call. Python owns all memory of it. */
typedef struct {
        const node_t *nodes;
        int64_t node_count;
        const int64_t *links;
        const uint8_t *text;
        const struct arrow_array *array;
        int64_t array_count;
        const int64_t *zone_starts; /* second from which an offset applies; the first is INT64_MIN */
        const int64_t *zone_offsets;
        int64_t zone_count;
        int64_t zone_repeats;   /* from this second on, the offsets repeat every 400 years */
        const uint64_t *powers; /* high and low 63 bits of powers of 10; see `shortest` */
        int64_t most_bytes;     /* that the text may take */
        int32_t *ends;          /* result: offsets, one more than there are rows */
        uint8_t *validity;      /* result: bitmap; NULL = no row is null */
} input_t;

/* How a call ended. STOPPED: the text would have become too large; `rows` were written before. */
enum { DONE = 0, NO_MEMORY = 1, STOPPED = 2 };

typedef struct {
        int64_t rows, status;
        part_t heap;
} block_t;

/* A node with the buffers of its array. */
typedef struct {
        const uint8_t *validity, *values, *heap;
        int64_t offset;
} place_t;

typedef struct {
        const input_t *input;
        place_t *places; /* by node */
        part_t *out;
        allowance_t allowance;
        int64_t zone_first, zone_past, zone_offset; /* the interval of the last timestamp */
} run_t;

/* Returns where to write at most `bytes` bytes; NULL if there is no room. */
static inline uint8_t *room(run_t *run, int64_t bytes) {
        return reserve_within(run->out, bytes, &run->allowance) ? run->out->at + run->out->bytes : NULL;
}

/* Ends what began with `room`. */
static inline int end(run_t *run, const uint8_t *to) {
        run->out->bytes = to - run->out->at;
        return 1;
}

static inline int put(run_t *run, const void *from, int64_t bytes) {
        uint8_t *to = room(run, bytes);
        if (!to)
                return 0;
        memcpy(to, from, (size_t)bytes);
        return end(run, to + bytes);
}

static inline int put_byte(run_t *run, uint8_t byte) {
        uint8_t *to = room(run, 1);
        if (!to)
                return 0;
        *to = byte;
        return end(run, to + 1);
}

/* ---- numbers ------------------------------------------------------------------------------------------- */

static const char PAIRS[] = "00010203040506070809101112131415161718192021222324252627282930313233343536373839"
                            "40414243444546474849505152535455565758596061626364656667686970717273747576777879"
                            "8081828384858687888990919293949596979899";

/* The most bytes that `write_number`, `write_double` and `write_moment` write. */
#define LONGEST_NUMBER 64

static inline uint8_t *write_pair(uint8_t *to, int64_t number) {
        memcpy(to, PAIRS + 2 * number, 2);
        return to + 2;
}

/* Writes a number with at least `least` digits. */
static uint8_t *write_digits(uint8_t *to, uint64_t number, int least) {
        uint8_t digits[20];
        int first = 20;

        while (number >= 100) {
                uint64_t rest = number / 100;
                first -= 2;
                memcpy(digits + first, PAIRS + 2 * (number - 100 * rest), 2);
                number = rest;
        }
        if (number >= 10) {
                first -= 2;
                memcpy(digits + first, PAIRS + 2 * number, 2);
        } else if (number > 0) {
                digits[--first] = (uint8_t)('0' + number);
        }
        while (first > 20 - least)
                digits[--first] = '0';
        memcpy(to, digits + first, (size_t)(20 - first));
        return to + 20 - first;
}

static inline uint8_t *write_number(uint8_t *to, int64_t number) {
        if (number < 0)
                *to++ = '-';
        return write_digits(to, number < 0 ? ~(uint64_t)number + 1 : (uint64_t)number, 1);
}

/*
 * Multiplies by a power of ten, and divides by 2^127. The lowest bit of the result is set if anything was cut off,
 * so that comparisons with the bounds of an interval are exact ("round to odd").
 */
static inline uint64_t scaled(const uint64_t power[2], uint64_t number) {
        wide_t low = (wide_t)power[1] * number >> 64;
        wide_t sum = (wide_t)power[0] * number + (low << 1);
        return (uint64_t)(sum >> 64) | ((uint64_t)sum > 1);
}

/*
 * Finds the decimal `digits` * 10^`exponent` that Double.toString of Java writes (JDK 19 and later): the shortest one
 * that rounds to c * 2^q, with at least two digits; if several are equally short, the one closest to c * 2^q.
 *
 * The algorithm is Raffaello Giulietti's "Schubfach". `powers` has, for k from -324 to 292, the 126 highest bits of
 * 10^-k, rounded up; Python computes them.
 */
static uint64_t shortest(const uint64_t *powers, uint64_t c, int64_t q, int is_irregular, int64_t *exponent) {
        /* floor(log10(2^q)), or floor(log10(3/4 * 2^q)) where the next smaller number is only half as far away */
        int64_t k   = (q * INT64_C(661971961083) - (is_irregular ? INT64_C(274743187321) : 0)) >> 41;
        int64_t h   = q + ((-k * INT64_C(913124641741)) >> 38) + 2; /* q + floor(log2(10^-k)) + 2 */
        uint64_t is_odd            = c & 1;
        const uint64_t *power      = powers + 2 * (k + 324);
        uint64_t at                = scaled(power, c << 2 << h);
        uint64_t low               = scaled(power, ((c << 2) - (is_irregular ? 1 : 2)) << h);
        uint64_t high              = scaled(power, ((c << 2) + 2) << h);
        uint64_t s                 = at >> 2, t = s + 1;
        int is_s_inside, is_t_inside;

        *exponent = k;
        if (s >= 100) {
                uint64_t s10 = s / 10 * 10, t10 = s10 + 10;
                is_s_inside = low + is_odd <= s10 << 2;
                is_t_inside = (t10 << 2) + is_odd <= high;
                if (is_s_inside != is_t_inside)
                        return is_s_inside ? s10 : t10;
        }
        is_s_inside = low + is_odd <= s << 2;
        is_t_inside = (t << 2) + is_odd <= high;
        if (is_s_inside != is_t_inside)
                return is_s_inside ? s : t;
        if (at != (s + t) << 1)
                return at < (s + t) << 1 ? s : t;
        return s & 1 ? t : s;
}

/* Writes digits * 10^exponent in Java's notation: plain from 10^-3 to 10^7, otherwise with an exponent. */
static uint8_t *write_floating(uint8_t *to, uint64_t digits, int64_t exponent) {
        uint8_t found[24];
        int64_t count, point;

        while (digits >= 100000000 && digits % 100000000 == 0) {
                digits /= 100000000;
                exponent += 8;
        }
        while (digits >= 10 && digits % 10 == 0) {
                digits /= 10;
                exponent++;
        }
        count = write_digits(found, digits, 1) - found;
        point = count + exponent; /* the value is 0.DIGITS * 10^point */
        if (point > 0 && point <= 7) {
                if (count <= point) {
                        memcpy(to, found, (size_t)count);
                        memset(to + count, '0', (size_t)(point - count));
                        memcpy(to + point, ".0", 2);
                        return to + point + 2;
                }
                memcpy(to, found, (size_t)point);
                to[point] = '.';
                memcpy(to + point + 1, found + point, (size_t)(count - point));
                return to + count + 1;
        }
        if (point > -3 && point <= 0) {
                memcpy(to, "0.", 2);
                memset(to + 2, '0', (size_t)-point);
                memcpy(to + 2 - point, found, (size_t)count);
                return to + 2 - point + count;
        }
        *to++ = found[0];
        *to++ = '.';
        if (count == 1)
                *to++ = '0';
        memcpy(to, found + 1, (size_t)(count - 1));
        to += count - 1;
        *to++ = 'E';
        return write_number(to, point - 1);
}

/* Writes a number of `fraction_bits` and `exponent_bits`: 52 and 11 for double, 23 and 8 for float. */
static uint8_t *write_double(const uint64_t *powers, uint8_t *to, uint64_t bits, int fraction_bits, int exponent_bits) {
        uint64_t fraction = bits & ((UINT64_C(1) << fraction_bits) - 1);
        int64_t biased    = (int64_t)(bits >> fraction_bits) & ((1 << exponent_bits) - 1);
        int64_t lowest    = 2 - (1 << (exponent_bits - 1)) - fraction_bits; /* exponent of subnormal numbers */
        int64_t q         = biased ? lowest + biased - 1 : lowest;
        uint64_t c        = biased ? fraction | UINT64_C(1) << fraction_bits : fraction;
        int64_t exponent  = 0;
        uint64_t digits;

        if (bits >> (fraction_bits + exponent_bits))
                *to++ = '-';
        if (c == 0) {
                memcpy(to, "0.0", 3);
                return to + 3;
        }
        if (q <= 0 && -q <= fraction_bits && (c & ((UINT64_C(1) << -q) - 1)) == 0) {
                digits = c >> -q;
        } else if (biased == 0 && c < (fraction_bits == 52 ? 3 : 8)) { /* one digit is enough: take the best two */
                digits = shortest(powers, 10 * c, q, 0, &exponent);
                exponent--;
        } else {
                digits = shortest(powers, c, q, fraction == 0 && biased > 1, &exponent);
        }
        return write_floating(to, digits, exponent);
}

static int put_floating(run_t *run, const node_t *node, const uint8_t *from) {
        int is_double = node->op == WRITE_DOUBLE;
        int is_quoted = node->quotes == KEY;
        uint8_t *to   = room(run, LONGEST_NUMBER);
        uint64_t bits = 0, finite;

        if (!to)
                return 0;
        memcpy(&bits, from, is_double ? 8 : 4);
        finite = is_double ? UINT64_C(0x7FF0000000000000) : UINT64_C(0x7F800000);
        if ((bits & finite) == finite) {
                int is_nan      = (bits & (finite ^ (is_double ? (uint64_t)INT64_MAX : UINT64_C(0x7FFFFFFF)))) != 0;
                int is_negative = (int)(bits >> (is_double ? 63 : 31)) & 1;
                if (node->quotes != BARE)
                        *to++ = '"';
                if (is_nan) {
                        memcpy(to, "NaN", 3);
                        to += 3;
                } else {
                        if (is_negative)
                                *to++ = '-';
                        memcpy(to, "Infinity", 8);
                        to += 8;
                }
                if (node->quotes != BARE)
                        *to++ = '"';
                return end(run, to);
        }
        if (is_quoted)
                *to++ = '"';
        to = write_double(run->input->powers, to, bits, is_double ? 52 : 23, is_double ? 11 : 8);
        if (is_quoted)
                *to++ = '"';
        return end(run, to);
}

/*
 * Writes a decimal with `a` digits after the point. With `b`, as Java's BigDecimal.toString: with an exponent if it
 * would be less than 10^-6.
 */
static int put_decimal(run_t *run, const node_t *node, const uint8_t *from) {
        const uint64_t group = UINT64_C(10000000000000000000);
        uint8_t *to          = room(run, 2 * LONGEST_NUMBER);
        uint8_t digits[64];
        int64_t count, scale = node->a;
        wide_t value;
        int is_negative;

        if (!to)
                return 0;
        memcpy(&value, from, 16);
        is_negative = (int)(value >> 127);
        if (is_negative)
                value = ~value + 1;
        if (value >> 64 == 0) {
                count = write_digits(digits, (uint64_t)value, 1) - digits;
        } else {
                wide_t rest = value / group;
                uint8_t *at = digits;
                if (rest >= group) {
                        at   = write_digits(at, (uint64_t)(rest / group), 1);
                        at   = write_digits(at, (uint64_t)(rest % group), 19);
                } else {
                        at = write_digits(at, (uint64_t)rest, 1);
                }
                count = write_digits(at, (uint64_t)(value % group), 19) - digits;
        }
        if (node->quotes == KEY)
                *to++ = '"';
        if (is_negative)
                *to++ = '-';
        if (scale == 0) {
                memcpy(to, digits, (size_t)count);
                to += count;
        } else if (node->b && count - 1 - scale < -6) {
                *to++ = digits[0];
                if (count > 1) {
                        *to++ = '.';
                        memcpy(to, digits + 1, (size_t)(count - 1));
                        to += count - 1;
                }
                *to++ = 'E';
                to    = write_number(to, count - 1 - scale);
        } else if (count > scale) {
                memcpy(to, digits, (size_t)(count - scale));
                to += count - scale;
                *to++ = '.';
                memcpy(to, digits + count - scale, (size_t)scale);
                to += scale;
        } else {
                memcpy(to, "0.", 2);
                memset(to + 2, '0', (size_t)(scale - count));
                memcpy(to + 2 + scale - count, digits, (size_t)count);
                to += 2 + scale;
        }
        if (node->quotes == KEY)
                *to++ = '"';
        return end(run, to);
}

/* ---- dates and times ----------------------------------------------------------------------------------- */

static inline int64_t floor_divide(int64_t number, int64_t divisor) {
        return number / divisor - (number % divisor < 0);
}

/* Writes a day, counted from 1970-01-01, in the Gregorian calendar; years beyond 9999 have a sign, as in Java. */
static uint8_t *write_day(uint8_t *to, int64_t day) {
        int64_t shifted = day + 719468; /* from March 1st of the year 0, so that leap days end years */
        int64_t era     = floor_divide(shifted, 146097);
        int64_t of_era  = shifted - era * 146097;
        int64_t year    = (of_era - of_era / 1460 + of_era / 36524 - of_era / 146096) / 365;
        int64_t of_year = of_era - (365 * year + year / 4 - year / 100);
        int64_t month   = (5 * of_year + 2) / 153; /* 0 = March */

        year += era * 400 + (month >= 10);
        if (year < 0 || year > 9999)
                *to++ = year < 0 ? '-' : '+';
        to    = write_digits(to, (uint64_t)(year < 0 ? -year : year), 4);
        *to++ = '-';
        to    = write_pair(to, month < 10 ? month + 3 : month - 9);
        *to++ = '-';
        return write_pair(to, of_year - (153 * month + 2) / 5 + 1);
}

/* Returns how many seconds local time is ahead of UTC at a second. */
static int64_t zone_offset(run_t *run, int64_t second) {
        const int64_t years_400 = INT64_C(12622780800);
        const input_t *input    = run->input;
        int64_t low = 0, high = input->zone_count;

        if (second >= input->zone_repeats)
                second = input->zone_repeats + (second - input->zone_repeats) % years_400;
        if (second >= run->zone_first && second < run->zone_past)
                return run->zone_offset;
        while (high - low > 1) {
                int64_t middle = low + (high - low) / 2;
                if (input->zone_starts[middle] <= second)
                        low = middle;
                else
                        high = middle;
        }
        run->zone_first  = input->zone_starts[low];
        run->zone_past   = high < input->zone_count ? input->zone_starts[high] : INT64_MAX;
        run->zone_offset = input->zone_offsets[low];
        return run->zone_offset;
}

/* What a timestamp's operand `a` says. */
enum { SPACE = 1, MICROS = 2, TRIMMED = 4, MINUTES = 8, SECONDS = 16 };

/*
 * Writes a timestamp. Between day and time is T, or a space (SPACE); the fraction has 3 digits, or 6 (MICROS), or as
 * many as are not zero (TRIMMED). The offset follows in hours and minutes (MINUTES), with SECONDS also in seconds if
 * it has any; it is Z where it would be zero. Without either, the timestamp has no time zone.
 */
static uint8_t *write_moment(run_t *run, uint8_t *to, int64_t micros, int64_t form) {
        int64_t second   = floor_divide(micros, 1000000);
        int64_t fraction = micros - second * 1000000;
        int64_t offset   = form & (MINUTES | SECONDS) ? zone_offset(run, second) : 0;
        int64_t day, of_day;

        second += offset;
        day    = floor_divide(second, 86400);
        of_day = second - day * 86400;
        to     = write_day(to, day);
        *to++  = form & SPACE ? ' ' : 'T';
        to     = write_pair(to, of_day / 3600);
        *to++  = ':';
        to     = write_pair(to, of_day / 60 % 60);
        *to++  = ':';
        to     = write_pair(to, of_day % 60);
        if (form & TRIMMED) {
                if (fraction) {
                        *to++ = '.';
                        to    = write_digits(to, (uint64_t)fraction, 6);
                        while (to[-1] == '0')
                                to--;
                }
        } else {
                *to++ = '.';
                to    = form & MICROS ? write_digits(to, (uint64_t)fraction, 6)
                                      : write_digits(to, (uint64_t)fraction / 1000, 3);
        }
        if (form & (MINUTES | SECONDS)) {
                int64_t size = offset < 0 ? -offset : offset;
                if (size < 60 && (size == 0 || !(form & SECONDS))) {
                        *to++ = 'Z';
                        return to;
                }
                *to++ = offset < 0 ? '-' : '+';
                to    = write_pair(to, size / 3600);
                *to++ = ':';
                to    = write_pair(to, size / 60 % 60);
                if (form & SECONDS && size % 60) {
                        *to++ = ':';
                        to    = write_pair(to, size % 60);
                }
        }
        return to;
}

/* ---- strings and bytes --------------------------------------------------------------------------------- */

#define EACH(byte) (UINT64_C(0x0101010101010101) * (byte))

/* Marks the bytes of eight that are not copied as they are. The lowest mark is exact, marks above it need not be. */
static inline uint64_t specials(uint64_t eight) {
        uint64_t quote = eight ^ EACH('"'), slash = eight ^ EACH('\\');
        return (eight | ((eight - EACH(0x20)) & ~eight) | ((quote - EACH(1)) & ~quote) |
                ((slash - EACH(1)) & ~slash)) &
               EACH(0x80);
}

/*
 * Returns how many bytes the character at `at` takes, whose first byte is not ASCII; or, negative, how many bytes
 * Java's decoder replaces by one U+FFFD: the longest beginning of a character that there is, or all of a surrogate.
 */
static int character(const uint8_t *at, const uint8_t *past) {
        uint8_t first = at[0], low = 0x80, high = 0xBF;
        int more, have;

        if (first < 0xC2 || first > 0xF4)
                return -1;
        more = first < 0xE0 ? 1 : first < 0xF0 ? 2 : 3;
        if (first == 0xE0)
                low = 0xA0;
        else if (first == 0xF0)
                low = 0x90;
        else if (first == 0xF4)
                high = 0x8F;
        for (have = 1; have <= more; have++) {
                if (at + have == past || at[have] < low || at[have] > high)
                        return -have;
                low  = 0x80;
                high = 0xBF;
        }
        if (first == 0xED && at[1] > 0x9F)
                return -3;
        return more + 1;
}

static const char ESCAPES[32] = "uuuuuuuubtnufruuuuuuuuuuuuuuuuuu";
static const char HEX[]       = "0123456789ABCDEF";

/* Writes a string between quotes as Jackson does. */
static int put_string(run_t *run, const uint8_t *from, int64_t bytes) {
        const uint8_t *past = from + bytes;
        uint8_t *to         = room(run, bytes + 16);

        if (!to)
                return 0;
        *to++ = '"';
        while (from < past) {
                uint8_t byte;
                while (past - from >= 8) {
                        uint64_t eight, marks;
                        memcpy(&eight, from, 8);
                        memcpy(to, &eight, 8);
                        marks = specials(eight);
                        if (marks) {
                                int plain = __builtin_ctzll(marks) >> 3;
                                from += plain;
                                to += plain;
                                break;
                        }
                        from += 8;
                        to += 8;
                }
                if (from == past)
                        break;
                byte = *from;
                if (byte >= 0x80) {
                        int taken = 0;
                        while (from < past && *from >= 0x80 && (taken = character(from, past)) > 0) {
                                if (past - from >= 4) {
                                        memcpy(to, from, 4); /* faster than a copy of the exact length */
                                        from += taken;
                                        to += taken;
                                } else {
                                        for (; taken; taken--)
                                                *to++ = *from++;
                                        taken = 1;
                                }
                        }
                        if (taken > 0)
                                continue;
                        memcpy(to, "\xEF\xBF\xBD", 3);
                        to += 3;
                        from -= taken;
                } else if (byte < 0x20) {
                        *to++ = '\\';
                        *to++ = (uint8_t)ESCAPES[byte];
                        if (ESCAPES[byte] == 'u') {
                                *to++ = '0';
                                *to++ = '0';
                                *to++ = (uint8_t)HEX[byte >> 4];
                                *to++ = (uint8_t)HEX[byte & 15];
                        }
                        from++;
                } else if (byte == '"' || byte == '\\') {
                        *to++ = '\\';
                        *to++ = byte;
                        from++;
                } else {
                        *to++ = byte;
                        from++;
                        continue;
                }
                end(run, to); /* more was written than read, so there may be too little room for the rest */
                to = room(run, past - from + 16);
                if (!to)
                        return 0;
        }
        *to++ = '"';
        return end(run, to);
}

/* Writes bytes as base64 between quotes. */
static int put_base64(run_t *run, const uint8_t *from, int64_t bytes) {
        static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        uint8_t *to                 = room(run, (bytes + 2) / 3 * 4 + 2);
        const uint8_t *past         = from + bytes;

        if (!to)
                return 0;
        *to++ = '"';
        for (; past - from > 0; from += 3) {
                int64_t left   = past - from;
                uint32_t three = (uint32_t)from[0] << 16 | (left > 1 ? (uint32_t)from[1] << 8 : 0) |
                                 (left > 2 ? (uint32_t)from[2] : 0);
                *to++ = (uint8_t)letters[three >> 18];
                *to++ = (uint8_t)letters[three >> 12 & 63];
                *to++ = (uint8_t)(left > 1 ? letters[three >> 6 & 63] : '=');
                *to++ = (uint8_t)(left > 2 ? letters[three & 63] : '=');
        }
        *to++ = '"';
        return end(run, to);
}

/* ---- values -------------------------------------------------------------------------------------------- */

static inline int64_t integer(const uint8_t *from, int64_t width) {
        int64_t number;
        int32_t four;
        int16_t two;
        switch (width) {
        case 1:
                return (int8_t)*from;
        case 2:
                memcpy(&two, from, 2);
                return two;
        case 4:
                memcpy(&four, from, 4);
                return four;
        default:
                memcpy(&number, from, 8);
                return number;
        }
}

static int put_value(run_t *run, int64_t index, int64_t at);

/* Writes value number `at` of the node's array, not counting the array's own offset, or null. */
static inline int put_or_null(run_t *run, int64_t index, int64_t at) {
        const place_t *place = &run->places[index];
        if (run->input->nodes[index].op == WRITE_NULL || !is_valid(place->validity, at + place->offset))
                return put(run, "null", 4);
        return put_value(run, index, at);
}

/* Writes the fields of a struct, null fields only if operand `a` is set. `at` includes the struct's offset. */
static int put_struct(run_t *run, const node_t *node, int64_t at) {
        const input_t *input = run->input;
        int64_t child, is_first = 1;

        if (!put_byte(run, '{'))
                return 0;
        for (child = 0; child < node->size; child++) {
                int64_t index        = input->links[node->first + child];
                const node_t *field  = &input->nodes[index];
                const place_t *place = &run->places[index];
                int is_null          = field->op == WRITE_NULL || !is_valid(place->validity, at + place->offset);
                if (is_null && !node->a)
                        continue;
                if (!put(run, input->text + field->name + is_first, field->name_bytes - is_first) ||
                    !(is_null ? put(run, "null", 4) : put_value(run, index, at)))
                        return 0;
                is_first = 0;
        }
        return put_byte(run, '}');
}

static int put_items(run_t *run, const node_t *node, const place_t *place, int64_t at) {
        const int64_t *links = run->input->links + node->first;
        int64_t first        = offset_at(place->values, at, node->a);
        int64_t past         = offset_at(place->values, at + 1, node->a);
        int64_t entry;

        if (!put_byte(run, node->op == WRITE_MAP ? '{' : '['))
                return 0;
        for (entry = first; entry < past; entry++) {
                if (entry > first && !put_byte(run, ','))
                        return 0;
                if (node->op == WRITE_LIST) {
                        if (!put_or_null(run, links[0], entry))
                                return 0;
                } else {
                        /* links[2] is the struct of the entries, which has an offset of its own */
                        int64_t inside = entry + run->places[links[2]].offset;
                        if (!put_value(run, links[0], inside) || !put_byte(run, ':') ||
                            !put_or_null(run, links[1], inside))
                                return 0;
                }
        }
        return put_byte(run, node->op == WRITE_MAP ? '}' : ']');
}

/* Writes value number `at` of the node's array, not counting the array's own offset. It is not null. */
static int put_value(run_t *run, int64_t index, int64_t at) {
        const node_t *node   = &run->input->nodes[index];
        const place_t *place = &run->places[index];
        int is_quoted        = node->quotes == KEY;
        const uint8_t *from;
        int64_t first, bytes;
        uint8_t *to;

        at += place->offset;
        switch (node->op) {
        case WRITE_BOOLEAN:
        case WRITE_INTEGER:
                to = room(run, LONGEST_NUMBER);
                if (!to)
                        return 0;
                if (is_quoted)
                        *to++ = '"';
                if (node->op == WRITE_INTEGER) {
                        to = write_number(to, integer(place->values + at * node->a, node->a));
                } else if (place->values[at >> 3] >> (at & 7) & 1) {
                        memcpy(to, "true", 4);
                        to += 4;
                } else {
                        memcpy(to, "false", 5);
                        to += 5;
                }
                if (is_quoted)
                        *to++ = '"';
                return end(run, to);
        case WRITE_FLOAT:
                return put_floating(run, node, place->values + at * 4);
        case WRITE_DOUBLE:
                return put_floating(run, node, place->values + at * 8);
        case WRITE_DECIMAL:
                return put_decimal(run, node, place->values + at * 16);
        case WRITE_DATE:
        case WRITE_TIMESTAMP:
                to = room(run, LONGEST_NUMBER);
                if (!to)
                        return 0;
                if (node->quotes != BARE)
                        *to++ = '"';
                to = node->op == WRITE_DATE
                             ? write_day(to, integer(place->values + at * 4, 4))
                             : write_moment(run, to, integer(place->values + at * 8, 8), node->a);
                if (node->quotes != BARE)
                        *to++ = '"';
                return end(run, to);
        case WRITE_STRING:
        case WRITE_BINARY:
                first = offset_at(place->values, at, node->a);
                bytes = offset_at(place->values, at + 1, node->a) - first;
                from  = bytes ? place->heap + first : (const uint8_t *)"";
                return node->op == WRITE_STRING ? put_string(run, from, bytes) : put_base64(run, from, bytes);
        case WRITE_STRUCT:
                return put_struct(run, node, at);
        default: /* WRITE_LIST, WRITE_MAP */
                return put_items(run, node, place, at);
        }
}

/*
 * Writes the values of an array as one column of text. Returns NULL if there is not enough memory for the block
 * itself, or the array is not of the type that the program was compiled for. Otherwise the caller frees the block
 * with kafka_eos_json_text_free. A row that is null stays null.
 */
EXPORT block_t *kafka_eos_json_text_write(const input_t *input) {
        const struct arrow_array **arrays = NULL;
        block_t *block                    = calloc(1, sizeof(block_t));
        run_t run = {.input = input, .zone_first = INT64_MAX, .zone_past = INT64_MIN};
        int64_t index, row, rows = input->array->length;

        run.places = calloc((size_t)input->node_count, sizeof(*run.places));
        if (count_arrays(input->array) == input->array_count)
                arrays = malloc((size_t)input->array_count * sizeof(*arrays));
        if (!block || !run.places || !arrays) {
                free(block);
                free(run.places);
                free(arrays);
                return NULL;
        }
        flatten(input->array, arrays, 0);
        for (index = 0; index < input->node_count; index++) {
                const struct arrow_array *array = arrays[input->nodes[index].array];
                place_t *place                  = &run.places[index];
                place->offset                   = array->offset;
                place->validity                 = array->n_buffers > 0 ? array->buffers[0] : NULL;
                place->values                   = array->n_buffers > 1 ? array->buffers[1] : NULL;
                place->heap                     = array->n_buffers > 2 ? array->buffers[2] : NULL;
        }
        free(arrays);
        run.out            = &block->heap;
        run.allowance.left = input->most_bytes < KAFKA_EOS_LARGEST_OFFSET ? input->most_bytes
                                                                          : KAFKA_EOS_LARGEST_OFFSET;
        input->ends[0]     = 0;
        for (row = 0; row < rows; row++) {
                int64_t start = block->heap.bytes;
                if (input->nodes[0].op != WRITE_NULL &&
                    is_valid(run.places[0].validity, row + run.places[0].offset)) {
                        if (!put_value(&run, 0, row)) {
                                block->heap.bytes = start;
                                block->status     = run.allowance.is_exceeded ? STOPPED : NO_MEMORY;
                                break;
                        }
                        if (input->validity)
                                input->validity[row >> 3] |= (uint8_t)(1 << (row & 7));
                }
                input->ends[row + 1] = (int32_t)block->heap.bytes;
        }
        free(run.places);
        block->rows = row;
        return block;
}

EXPORT void kafka_eos_json_text_free(block_t *block) {
        if (!block)
                return;
        free(block->heap.at);
        free(block);
}
