/* The XLA FFI handler of a compiled point function over plain arrays. Attribute `function`: the key of a ct_pointwise,
 * u64. An operand or result holds `size` values for every point, one point after the other; the compiled function wants
 * each value of many points together, so blocks of points are rearranged on the way, in memory that stays in the cache.
 * An operand with a single point serves all points. */
#include "ceedtap.h"
#include "xla_ffi.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { BLOCK = 128 }; /* points; a multiple of any vector length */

static void state_free(void *object) { ct_registry_unref(ct_pointwise_functions(), ((ct_pointwise *)object)->key); }

static XLA_FFI_TypeId type_id = {0};
static XLA_FFI_TypeInfo type_info = {XLA_FFI_TypeInfo_STRUCT_SIZE, NULL, state_free};
void *ct_pointwise_type_id(void) { return &type_id; }
void *ct_pointwise_type_info(void) { return &type_info; }

static XLA_FFI_Error *instantiate(XLA_FFI_CallFrame *frame) {
  if (ct_ffi_metadata(frame, &type_id)) return NULL;
  const XLA_FFI_Scalar *attr = ct_ffi_attr(frame, "function", XLA_FFI_AttrType_SCALAR);
  uint64_t key = attr && attr->dtype == XLA_FFI_DataType_U64 ? *(const uint64_t *)attr->value : 0;
  if (!ct_registry_ref(ct_pointwise_functions(), key)) {
    char text[200];
    snprintf(text, sizeof text,
             "ceedtap: there is no compiled point function %016" PRIx64 " in this process; trace the program again", key);
    return ct_ffi_error(frame->api, XLA_FFI_Error_Code_FAILED_PRECONDITION, text);
  }
  return ct_ffi_set_state(frame, &type_id, ct_registry_payload(ct_pointwise_functions(), key));
}

/* rows x points from points x rows; `stride` between the points of the source: 0 repeats one point. Eight points at a
 * time, so that a cache line of the target is written at once and the source is read nearly in sequence. */
static void gather(double *restrict to, const double *restrict from, int64_t size, int64_t stride, int points) {
  int i = 0;
  for (; i + 8 <= points; i += 8)
    for (int64_t row = 0; row < size; row++)
      for (int k = 0; k < 8; k++) to[row * points + i + k] = from[(i + k) * stride + row];
  for (; i < points; i++)
    for (int64_t row = 0; row < size; row++) to[row * points + i] = from[i * stride + row];
}

static void scatter(double *restrict to, const double *restrict from, int64_t size, int points) {
  int i = 0;
  for (; i + 8 <= points; i += 8)
    for (int64_t row = 0; row < size; row++)
      for (int k = 0; k < 8; k++) to[(i + k) * size + row] = from[row * points + i + k];
  for (; i < points; i++)
    for (int64_t row = 0; row < size; row++) to[i * size + row] = from[row * points + i];
}

static XLA_FFI_Error *check(XLA_FFI_CallFrame *frame, const ct_pointwise *f, int64_t *num_points) {
  int valid = frame->args.size == f->num_in && frame->rets.size == f->num_out;
  *num_points = 1;
  for (int i = 0; valid && i < f->num_in + f->num_out; i++) {
    const XLA_FFI_Buffer *buffer = i < f->num_in ? frame->args.args[i] : frame->rets.rets[i - f->num_in];
    int64_t n = ct_ffi_num_elements(buffer), points = f->sizes[i] > 0 ? n / f->sizes[i] : 1;
    valid = buffer->dtype == XLA_FFI_DataType_F64 && points * f->sizes[i] == n &&
            (points == 1 || *num_points == 1 || points == *num_points);
    if (points != 1) *num_points = points;
  }
  if (valid) return NULL;
  return ct_ffi_error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                      "ceedtap: the operands do not fit the compiled point function");
}

static XLA_FFI_Error *execute(XLA_FFI_CallFrame *frame) {
  if (ct_ffi_metadata(frame, NULL)) return NULL;
  void *state;
  XLA_FFI_Error *error = ct_ffi_get_state(frame, &type_id, &state);
  if (error) return error;
  const ct_pointwise *f = state;
  int64_t num_points;
  error = check(frame, f, &num_points);
  if (error) return error;

  int num_fields = f->num_in + f->num_out;
  int64_t rows = 0;
  for (int i = 0; i < num_fields; i++) rows += f->sizes[i];
  double *scratch = malloc((size_t)(rows + 1) * BLOCK * sizeof(double));
  double **fields = malloc((size_t)(num_fields + 1) * sizeof(double *));
  if (!scratch || !fields) {
    free(scratch);
    free(fields);
    return ct_ffi_error(frame->api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "ceedtap: out of memory");
  }
  for (int64_t start = 0; start < num_points; start += BLOCK) {
    int points = num_points - start < BLOCK ? (int)(num_points - start) : BLOCK;
    double *next = scratch;
    for (int i = 0; i < num_fields; i++) {
      fields[i] = next;
      next += f->sizes[i] * BLOCK;
      if (i >= f->num_in) continue;
      const XLA_FFI_Buffer *buffer = frame->args.args[i];
      int shared = ct_ffi_num_elements(buffer) == f->sizes[i] && num_points > 1;
      const double *from = (const double *)buffer->data + (shared ? 0 : start * f->sizes[i]);
      /* One value for a point lies as the function wants it. */
      if (f->sizes[i] == 1 && !shared) fields[i] = (double *)from;
      else gather(fields[i], from, f->sizes[i], shared ? 0 : f->sizes[i], points);
    }
    f->function(NULL, points, (const double *const *)fields, fields + f->num_in);
    for (int i = 0; i < f->num_out; i++) {
      const XLA_FFI_Buffer *buffer = frame->rets.rets[i];
      int64_t size = f->sizes[f->num_in + i];
      scatter((double *)buffer->data + start * size, fields[f->num_in + i], size, points);
    }
  }
  free(scratch);
  free(fields);
  return NULL;
}

void *ct_pointwise_instantiate_address(void) { return (void *)instantiate; }
void *ct_pointwise_execute_address(void) { return (void *)execute; }
