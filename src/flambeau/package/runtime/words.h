/* Reads the words of a package in order. Every count is checked before it is used. */
#ifndef FLAMBEAU_WORDS_H
#define FLAMBEAU_WORDS_H
#include "internal.h"

typedef struct {
  const int64_t *at, *end;
  const char* wrong; /* the first error */
} cursor;

static inline int64_t wrong(cursor* c, const char* what) {
  if (!c->wrong) c->wrong = what;
  c->at = c->end;
  return 0;
}
static inline int64_t word(cursor* c) { return c->at < c->end ? *c->at++ : wrong(c, "it ends too early"); }
static inline const int64_t* words(cursor* c, int64_t count, int64_t each) {
  if (count < 0 || count > (c->end - c->at) / each) return wrong(c, "a count is larger than the file"), NULL;
  c->at += count * each;
  return c->at - count * each;
}
static inline int64_t below(cursor* c, int64_t most) {
  int64_t found = word(c);
  return found >= 0 && found < most ? found : wrong(c, "a number is out of its range");
}
static inline int64_t count_of(cursor* c) { return below(c, c->end - c->at + 1); }
static inline const char* string(cursor* c) {
  int64_t length = below(c, 8 * (c->end - c->at) + 1), size = length / 8 + 1;
  const char* text = (const char*)words(c, size, 1);
  if (!text) return "";
  for (int64_t k = 0; k < size * 8; ++k) {
    if ((text[k] == 0) != (k >= length)) return wrong(c, "a text is damaged"), "";
  }
  return text;
}
static inline const int64_t* references(cursor* c, int64_t count, int64_t least, int64_t most) {
  const int64_t* found = words(c, count, 1);
  for (int64_t k = 0; found && k < count; ++k) {
    if (found[k] < least || found[k] >= most) return wrong(c, "a number is out of its range"), NULL;
  }
  return found;
}
#endif
