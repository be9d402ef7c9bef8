/* The XLA FFI handler of a tap: copies the header that was made when the program was traced and the operands, in
 * sequence, into a frame of the queue. Attribute `header`: u32 words, [1] and [2] are the consumer id. */
#include "ceedtap.h"
#include "queue.h"
#include "xla_ffi.h"

#include <stdlib.h>

typedef struct tap_state {
  uint64_t consumer;
} tap_state;

static void state_free(void *object) {
  ct_registry_unref(ct_consumers(), ((tap_state *)object)->consumer);
  free(object);
}

static XLA_FFI_TypeId type_id = {0};
static XLA_FFI_TypeInfo type_info = {XLA_FFI_TypeInfo_STRUCT_SIZE, NULL, state_free};
void *ct_tap_type_id(void) { return &type_id; }
void *ct_tap_type_info(void) { return &type_info; }

static const XLA_FFI_Array *header_of(const XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Array *header = ct_ffi_attr(frame, "header", XLA_FFI_AttrType_ARRAY);
  return header && header->dtype == XLA_FFI_DataType_U32 && header->size >= 32 ? header : NULL;
}

static uint64_t consumer_of(const XLA_FFI_Array *header) {
  const uint32_t *words = header->data;
  return (uint64_t)words[1] << 32 | words[2];
}

static XLA_FFI_Error *bad_header(const XLA_FFI_CallFrame *frame) {
  return ct_ffi_error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                      "ceedtap: a tap without a header of at least 32 u32 words; was this program made by ceedtap?");
}

static XLA_FFI_Error *instantiate(XLA_FFI_CallFrame *frame) {
  if (ct_ffi_metadata(frame, &type_id)) return NULL;
  const XLA_FFI_Array *header = header_of(frame);
  if (!header) return bad_header(frame);
  tap_state *state = malloc(sizeof *state);
  if (!state) return ct_ffi_error(frame->api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "ceedtap: out of memory");
  state->consumer = consumer_of(header);
  /* A program may be loaded before anybody has asked for its taps: then the key is entered here. */
  if (!ct_registry_ref(ct_consumers(), state->consumer)) ct_registry_add(ct_consumers(), state->consumer, NULL);
  return ct_ffi_set_state(frame, &type_id, state);
}

static XLA_FFI_Error *execute(XLA_FFI_CallFrame *frame) {
  if (ct_ffi_metadata(frame, NULL)) return NULL;
  const XLA_FFI_Array *header = header_of(frame);
  if (!header) return bad_header(frame);
  size_t size = header->size * sizeof(uint32_t);
  for (int64_t i = 0; i < frame->args.size; i++) {
    const XLA_FFI_Buffer *arg = frame->args.args[i];
    size += ct_ffi_item_size(arg->dtype) * (size_t)ct_ffi_num_elements(arg);
  }
  int closed;
  ct_frame *out = ct_queue_reserve(size, &closed);
  if (!out && closed) return NULL; /* counted as dropped: the process is ending */
  if (!out)
    return ct_ffi_error(frame->api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "ceedtap: no memory for the frame of a tap");

  unsigned char *bytes = ct_frame_bytes(out);
  memcpy(bytes, header->data, header->size * sizeof(uint32_t));
  bytes += header->size * sizeof(uint32_t);
  for (int64_t i = 0; i < frame->args.size; i++) {
    const XLA_FFI_Buffer *arg = frame->args.args[i];
    size_t n = ct_ffi_item_size(arg->dtype) * (size_t)ct_ffi_num_elements(arg);
    if (n) memcpy(bytes, arg->data, n);
    bytes += n;
  }
  XLA_FFI_RunId_Get_Args run = {XLA_FFI_RunId_Get_Args_STRUCT_SIZE, NULL, frame->ctx, 0};
  XLA_FFI_DeviceOrdinal_Get_Args device = {XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, NULL, frame->ctx, -1};
  XLA_FFI_Error *error = frame->api->XLA_FFI_RunId_Get(&run);
  if (!error) error = frame->api->XLA_FFI_DeviceOrdinal_Get(&device);
  if (error) { /* only labels are missing: the data must arrive all the same */
    XLA_FFI_Error_Destroy_Args destroy = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
    frame->api->XLA_FFI_Error_Destroy(&destroy);
  }
  out->consumer = consumer_of(header);
  out->run_id = run.run_id;
  out->device = device.device_ordinal;
  ct_queue_commit(out);
  return NULL;
}

void *ct_tap_instantiate_address(void) { return (void *)instantiate; }
void *ct_tap_execute_address(void) { return (void *)execute; }
