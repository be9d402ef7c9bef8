/* The XLA FFI handler of an embedded libCEED operator: points the operator's vectors at XLA's buffers, applies it, and
 * takes the buffers back. Attribute `operator`: the key of a ct_operator, u64. Operands and results hold one or more
 * L-vectors each, one after the other (vmap); an operand with a single one serves every application. */
#include "ceedtap.h"
#include "xla_ffi.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MEM_HOST = 0, USE_POINTER = 1 }; /* CeedMemType, CeedCopyMode: the same in every libCEED */

typedef struct operator_state {
  uint64_t key;
  ct_operator *op;
} operator_state;

static void state_free(void *object) {
  ct_registry_unref(ct_operators(), ((operator_state *)object)->key);
  free(object);
}

static XLA_FFI_TypeId type_id = {0};
static XLA_FFI_TypeInfo type_info = {XLA_FFI_TypeInfo_STRUCT_SIZE, NULL, state_free};
void *ct_operator_type_id(void) { return &type_id; }
void *ct_operator_type_info(void) { return &type_info; }

static XLA_FFI_Error *instantiate(XLA_FFI_CallFrame *frame) {
  if (ct_ffi_metadata(frame, &type_id)) return NULL;
  const XLA_FFI_Scalar *attr = ct_ffi_attr(frame, "operator", XLA_FFI_AttrType_SCALAR);
  if (!attr || attr->dtype != XLA_FFI_DataType_U64)
    return ct_ffi_error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                        "ceedtap: an operator call without its u64 attribute `operator`");
  operator_state *state = malloc(sizeof *state);
  if (!state) return ct_ffi_error(frame->api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "ceedtap: out of memory");
  state->key = *(const uint64_t *)attr->value;
  if (!ct_registry_ref(ct_operators(), state->key)) {
    char text[256];
    snprintf(text, sizeof text,
             "ceedtap: there is no embedded operator %016" PRIx64 " in this process. The program was compiled in another "
             "process, or its operator has been freed; embed the operator and trace the program again.",
             state->key);
    free(state);
    return ct_ffi_error(frame->api, XLA_FFI_Error_Code_FAILED_PRECONDITION, text);
  }
  state->op = ct_registry_payload(ct_operators(), state->key);
  return ct_ffi_set_state(frame, &type_id, state);
}

static const char *why_not(const ct_ceed_api *api, const ct_condition *condition) {
  const char *no_data = "it has no data; use set_value or set_array first";
  uint64_t state = 0;
  bool valid = true;
  void *context = NULL, *array;
  switch (condition->kind) {
    case CT_READABLE:
      if (!api->vector_get_state(condition->object, &state) && state % 2)
        return "it is locked by an array for writing; give that one back first (restore_array, or the end of its block)";
      return api->vector_has_valid_array(condition->object, &valid) || valid ? NULL : no_data;
    case CT_WRITABLE:
      if (api->vector_get_array_write(condition->object, MEM_HOST, &array))
        return "it is locked by an array of it that is out; give that one back first";
      api->vector_restore_array(condition->object, &array);
      return NULL;
    case CT_CONTEXT:
      if (api->qfunction_get_inner_context(condition->object, &context) || !context) return NULL;
      if (!api->context_get_state(context, &state) && state % 2) return "it is locked by a `with data()` block";
      return api->context_has_valid_data(context, &valid) || valid ? NULL : "it has no data; use set_data first";
    default: return NULL;
  }
}

/* What CeedOperatorApply would fail for half-way, which leaves the operator locked for good. */
static XLA_FFI_Error *check_conditions(const XLA_FFI_CallFrame *frame, const ct_operator *op) {
  char text[sizeof op->poison->text + 512];
  for (int i = 0; i < op->num_conditions; i++) {
    const ct_condition *condition = &op->conditions[i];
    if (condition->kind == CT_USABLE) {
      const ct_poison *poison = condition->object;
      if (!*poison->text) continue;
      snprintf(text, sizeof text, "ceedtap: %s cannot be used any more, libCEED left it locked. Poisoned by: %s",
               condition->name, poison->text);
      return ct_ffi_error(frame->api, XLA_FFI_Error_Code_FAILED_PRECONDITION, text);
    }
    const char *reason = why_not(op->api, condition);
    if (!reason) continue;
    const char *message;
    op->api->reset_error_message(op->ceed, &message);
    snprintf(text, sizeof text, "ceedtap: %s: %s. Nothing was computed; the operator can be used again then.",
             condition->name, reason);
    return ct_ffi_error(frame->api, XLA_FFI_Error_Code_FAILED_PRECONDITION, text);
  }
  return NULL;
}

static XLA_FFI_Error *failed(const XLA_FFI_CallFrame *frame, ct_operator *op, ct_poison *poison, const char *function,
                             int rc) {
  const char *message = "";
  if (op->api->get_error_message(op->ceed, &message) || !message) message = "";
  snprintf(poison->text, sizeof poison->text, "%s failed with code %d: %s", function, rc,
           *message ? message : "(no message)");
  /* libCEED's backends turn what a QFunction returns into a code of their own. */
  for (int i = 0; i < op->num_conditions; i++) {
    int status = op->conditions[i].take_status ? op->conditions[i].take_status() : 0;
    size_t length = strlen(poison->text);
    if (status)
      snprintf(poison->text + length, sizeof poison->text - length, "; %s returned %d", op->conditions[i].name, status);
  }
  op->api->reset_error_message(op->ceed, &message);
  return ct_ffi_error(frame->api, XLA_FFI_Error_Code_INTERNAL, poison->text);
}

/* Takes the buffers of the first `n` vectors back. After a failed apply libCEED may refuse: the vectors are locked,
 * the operator is poisoned and never called again, so that nothing reads the pointers that stay behind. */
static void take_back(ct_operator *op, int n) {
  for (int i = 0; i < n; i++) {
    void *array;
    if (op->vectors[i]) op->api->vector_take_array(op->vectors[i], MEM_HOST, &array);
  }
}

static int somebody_listens(const ct_operator *op) {
  if (!op->idle_op) return 1;
  for (int i = 0; i < op->num_wanted; i++)
    if (__atomic_load_n(op->wanted[i], __ATOMIC_RELAXED)) return 1;
  return 0;
}

static void write_number(char *to, int scalar_size, double value) {
  float single = (float)value;
  memcpy(to, scalar_size == 8 ? (const void *)&value : (const void *)&single, (size_t)scalar_size);
}

/* `listening`: decided once for all applications of a call, so that what is tapped is there for all of them or none. */
static XLA_FFI_Error *apply(XLA_FFI_CallFrame *frame, ct_operator *op, int listening, int64_t application) {
  int num_vectors = op->num_in + op->num_out, rc = 0, i;
  for (i = 0; i < num_vectors && !rc; i++) {
    const XLA_FFI_Buffer *buffer = i < op->num_in ? frame->args.args[i] : frame->rets.rets[i - op->num_in];
    int shared = ct_ffi_num_elements(buffer) == op->lengths[i]; /* one L-vector for all applications */
    size_t offset = shared ? 0 : (size_t)application * (size_t)op->lengths[i] * (size_t)op->api->scalar_size;
    char *data = (char *)buffer->data + offset;
    if (op->vectors[i]) rc = op->api->vector_set_array(op->vectors[i], MEM_HOST, USE_POINTER, data);
    else if (i >= op->num_in) write_number(data, op->api->scalar_size, listening);
    else memcpy(op->contexts[i], data, (size_t)op->lengths[i] * (size_t)op->api->scalar_size);
  }
  if (rc) {
    XLA_FFI_Error *error = failed(frame, op, op->poison, "CeedVectorSetArray", rc);
    take_back(op, i - 1);
    return error;
  }
  rc = op->api->operator_apply(listening ? op->op : op->idle_op, op->active_in, op->active_out, op->api->request_immediate);
  XLA_FFI_Error *error = NULL;
  if (rc) error = failed(frame, op, listening ? op->poison : op->idle_poison, "CeedOperatorApply", rc);
  take_back(op, num_vectors);
  return error;
}

static XLA_FFI_Error *check_buffers(XLA_FFI_CallFrame *frame, const ct_operator *op, int64_t *num_applications) {
  XLA_FFI_DataType dtype = op->api->scalar_size == 8 ? XLA_FFI_DataType_F64 : XLA_FFI_DataType_F32;
  int num_vectors = op->num_in + op->num_out;
  if (frame->args.size != op->num_in || frame->rets.size != op->num_out)
    return ct_ffi_error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                        "ceedtap: the program and the operator differ in the number of inputs or outputs");
  *num_applications = 1;
  for (int i = 0; i < num_vectors; i++) {
    const XLA_FFI_Buffer *buffer = i < op->num_in ? frame->args.args[i] : frame->rets.rets[i - op->num_in];
    int64_t n = ct_ffi_num_elements(buffer), count = op->lengths[i] > 0 ? n / op->lengths[i] : 1;
    if (buffer->dtype != dtype || (op->lengths[i] > 0 ? n % op->lengths[i] : n) ||
        (count != 1 && *num_applications != 1 && count != *num_applications)) {
      char text[256];
      snprintf(text, sizeof text,
               "ceedtap: %s %d of the operator must be L-vectors of %" PRId64 " float%d values, got %" PRId64 " values",
               i < op->num_in ? "input" : "output", i < op->num_in ? i : i - op->num_in, op->lengths[i],
               8 * op->api->scalar_size, n);
      return ct_ffi_error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT, text);
    }
    if (count != 1) *num_applications = count;
  }
  return NULL;
}

static XLA_FFI_Error *execute(XLA_FFI_CallFrame *frame) {
  if (ct_ffi_metadata(frame, NULL)) return NULL;
  void *state;
  XLA_FFI_Error *error = ct_ffi_get_state(frame, &type_id, &state);
  if (error) return error;
  ct_operator *op = ((operator_state *)state)->op;
  int64_t num_applications = 0;
  error = check_buffers(frame, op, &num_applications);
  if (error) return error;

  /* libCEED objects are not thread-safe, and XLA may run two independent custom calls at once. */
  if (!ct_lock_acquire(op->lock)) return ct_ffi_error(frame->api, XLA_FFI_Error_Code_FAILED_PRECONDITION, ct_lock_lost);
  error = check_conditions(frame, op);
  int listening = somebody_listens(op);
  for (int64_t i = 0; i < num_applications && !error; i++) error = apply(frame, op, listening, i);
  ct_lock_release(op->lock);
  return error;
}

void *ct_operator_instantiate_address(void) { return (void *)instantiate; }
void *ct_operator_execute_address(void) { return (void *)execute; }
