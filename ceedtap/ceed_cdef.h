/* What ceedtap uses of libCEED's C interface, for cffi's parser. `typedef float|double CeedScalar;` goes before it.
 *
 * One set of declarations serves libCEED 0.12 and every newer one: what a version lacks is an error only where it is
 * called, so functions of both are here.
 * Enumerations are declared as int, variables without their const (cffi refuses `extern const`). */

typedef int32_t CeedInt;
typedef ptrdiff_t CeedSize;
typedef signed char CeedInt8;
typedef int CeedMemType, CeedCopyMode, CeedNormType, CeedTransposeMode, CeedEvalMode, CeedQuadMode;
typedef int CeedElemTopology, CeedContextFieldType;

typedef struct Ceed_private *Ceed;
typedef struct CeedRequest_private *CeedRequest;
typedef struct CeedVector_private *CeedVector;
typedef struct CeedElemRestriction_private *CeedElemRestriction;
typedef struct CeedBasis_private *CeedBasis;
typedef struct CeedQFunctionField_private *CeedQFunctionField;
typedef struct CeedQFunction_private *CeedQFunction;
typedef struct CeedOperatorField_private *CeedOperatorField;
typedef struct CeedQFunctionContext_private *CeedQFunctionContext;
typedef struct CeedContextFieldLabel_private *CeedContextFieldLabel;
typedef struct CeedOperator_private *CeedOperator;

extern CeedRequest *CEED_REQUEST_IMMEDIATE;
extern CeedVector CEED_VECTOR_ACTIVE;
extern CeedVector CEED_VECTOR_NONE;
extern CeedBasis CEED_BASIS_NONE;
extern CeedElemRestriction CEED_ELEMRESTRICTION_NONE;
extern CeedQFunction CEED_QFUNCTION_NONE;
extern CeedInt CEED_STRIDES_BACKEND[3];

/* Ceed */
int CeedGetVersion(int *major, int *minor, int *patch, bool *release);
int CeedGetScalarType(int *scalar_type);
int CeedRegisterAll(void);
int CeedQFunctionRegisterAll(void);
int CeedGetGitVersion(const char **git_version);
int CeedGetBuildConfiguration(const char **build_config);
int CeedInit(const char *resource, Ceed *ceed);
int CeedReferenceCopy(Ceed ceed, Ceed *ceed_copy);
int CeedGetParent(Ceed ceed, Ceed *parent);
int CeedGetOperatorFallbackCeed(Ceed ceed, Ceed *fallback);
int CeedGetResource(Ceed ceed, const char **resource);
int CeedGetPreferredMemType(Ceed ceed, CeedMemType *type);
int CeedIsDeterministic(Ceed ceed, bool *is_deterministic);
int CeedAddJitSourceRoot(Ceed ceed, const char *jit_source_root);
int CeedAddJitDefine(Ceed ceed, const char *jit_define);
int CeedRegistryGetList(size_t *n, char **resources[], CeedInt **priorities);
int CeedView(Ceed ceed, FILE *stream);
int CeedDestroy(Ceed *ceed);
typedef int (*CeedErrorHandler)(Ceed, const char *, int, const char *, int, const char *, void *);
int CeedErrorStore(Ceed, const char *, int, const char *, int, const char *, void *);
int CeedSetErrorHandler(Ceed ceed, CeedErrorHandler handler);
int CeedGetErrorMessage(Ceed ceed, const char **message);
int CeedResetErrorMessage(Ceed ceed, const char **message);
int CeedGaussQuadrature(CeedInt Q, CeedScalar *q_ref_1d, CeedScalar *q_weight_1d);
int CeedLobattoQuadrature(CeedInt Q, CeedScalar *q_ref_1d, CeedScalar *q_weight_1d);

/* CeedVector */
int CeedVectorCreate(Ceed ceed, CeedSize len, CeedVector *vec);
int CeedVectorReferenceCopy(CeedVector vec, CeedVector *vec_copy);
int CeedVectorCopy(CeedVector vec, CeedVector vec_copy);
int CeedVectorSetArray(CeedVector vec, CeedMemType mem_type, CeedCopyMode copy_mode, CeedScalar *array);
int CeedVectorSetValue(CeedVector vec, CeedScalar value);
int CeedVectorSyncArray(CeedVector vec, CeedMemType mem_type);
int CeedVectorTakeArray(CeedVector vec, CeedMemType mem_type, CeedScalar **array);
int CeedVectorGetArray(CeedVector vec, CeedMemType mem_type, CeedScalar **array);
int CeedVectorGetArrayRead(CeedVector vec, CeedMemType mem_type, const CeedScalar **array);
int CeedVectorGetArrayWrite(CeedVector vec, CeedMemType mem_type, CeedScalar **array);
int CeedVectorRestoreArray(CeedVector vec, CeedScalar **array);
int CeedVectorRestoreArrayRead(CeedVector vec, const CeedScalar **array);
int CeedVectorNorm(CeedVector vec, CeedNormType type, CeedScalar *norm);
int CeedVectorScale(CeedVector x, CeedScalar alpha);
int CeedVectorAXPY(CeedVector y, CeedScalar alpha, CeedVector x);
int CeedVectorAXPBY(CeedVector y, CeedScalar alpha, CeedScalar beta, CeedVector x);
int CeedVectorPointwiseMult(CeedVector w, CeedVector x, CeedVector y);
int CeedVectorFilter(CeedVector x, CeedScalar threshold);
int CeedVectorReciprocal(CeedVector vec);
int CeedVectorGetCeed(CeedVector vec, Ceed *ceed);
int CeedVectorCopyStrided(CeedVector vec, CeedSize start, CeedSize stop, CeedSize step, CeedVector vec_copy);
int CeedVectorSetValueStrided(CeedVector vec, CeedSize start, CeedSize stop, CeedSize step, CeedScalar value);
int CeedVectorView(CeedVector vec, const char *fp_fmt, FILE *stream);
int CeedVectorViewRange(CeedVector vec, CeedSize start, CeedSize stop, CeedInt step, const char *fp_fmt, FILE *stream);
int CeedVectorGetLength(CeedVector vec, CeedSize *length);
int CeedVectorGetState(CeedVector vec, uint64_t *state);
int CeedVectorHasValidArray(CeedVector vec, bool *has_valid_array);
int CeedVectorHasBorrowedArrayOfType(CeedVector vec, CeedMemType mem_type, bool *has_borrowed_array_of_type);
int CeedVectorDestroy(CeedVector *vec);

/* CeedElemRestriction */
int CeedElemRestrictionCreate(Ceed ceed, CeedInt num_elem, CeedInt elem_size, CeedInt num_comp, CeedInt comp_stride,
                              CeedSize l_size, CeedMemType mem_type, CeedCopyMode copy_mode, const CeedInt *offsets,
                              CeedElemRestriction *rstr);
int CeedElemRestrictionCreateOriented(Ceed ceed, CeedInt num_elem, CeedInt elem_size, CeedInt num_comp,
                                      CeedInt comp_stride, CeedSize l_size, CeedMemType mem_type,
                                      CeedCopyMode copy_mode, const CeedInt *offsets, const bool *orients,
                                      CeedElemRestriction *rstr);
int CeedElemRestrictionCreateCurlOriented(Ceed ceed, CeedInt num_elem, CeedInt elem_size, CeedInt num_comp,
                                          CeedInt comp_stride, CeedSize l_size, CeedMemType mem_type,
                                          CeedCopyMode copy_mode, const CeedInt *offsets, const CeedInt8 *curl_orients,
                                          CeedElemRestriction *rstr);
int CeedElemRestrictionCreateStrided(Ceed ceed, CeedInt num_elem, CeedInt elem_size, CeedInt num_comp, CeedSize l_size,
                                     const CeedInt *strides, CeedElemRestriction *rstr);
int CeedElemRestrictionCreateBlocked(Ceed ceed, CeedInt num_elem, CeedInt elem_size, CeedInt block_size,
                                     CeedInt num_comp, CeedInt comp_stride, CeedSize l_size, CeedMemType mem_type,
                                     CeedCopyMode copy_mode, const CeedInt *offsets, CeedElemRestriction *rstr);
int CeedElemRestrictionCreateBlockedStrided(Ceed ceed, CeedInt num_elem, CeedInt elem_size, CeedInt block_size,
                                            CeedInt num_comp, CeedSize l_size, const CeedInt *strides,
                                            CeedElemRestriction *rstr);
int CeedElemRestrictionCreateBlockedOriented(Ceed ceed, CeedInt num_elem, CeedInt elem_size, CeedInt block_size,
                                             CeedInt num_comp, CeedInt comp_stride, CeedSize l_size,
                                             CeedMemType mem_type, CeedCopyMode copy_mode, const CeedInt *offsets,
                                             const bool *orients, CeedElemRestriction *rstr);
int CeedElemRestrictionCreateBlockedCurlOriented(Ceed ceed, CeedInt num_elem, CeedInt elem_size, CeedInt block_size,
                                                 CeedInt num_comp, CeedInt comp_stride, CeedSize l_size,
                                                 CeedMemType mem_type, CeedCopyMode copy_mode, const CeedInt *offsets,
                                                 const CeedInt8 *curl_orients, CeedElemRestriction *rstr);
int CeedElemRestrictionCreateAtPoints(Ceed ceed, CeedInt num_elem, CeedInt num_points, CeedInt num_comp,
                                      CeedSize l_size, CeedMemType mem_type, CeedCopyMode copy_mode,
                                      const CeedInt *offsets, CeedElemRestriction *rstr);
int CeedElemRestrictionReferenceCopy(CeedElemRestriction rstr, CeedElemRestriction *rstr_copy);
int CeedElemRestrictionApply(CeedElemRestriction rstr, CeedTransposeMode t_mode, CeedVector u, CeedVector ru,
                             CeedRequest *request);
int CeedElemRestrictionApplyBlock(CeedElemRestriction rstr, CeedInt block, CeedTransposeMode t_mode, CeedVector u,
                                  CeedVector ru, CeedRequest *request);
int CeedElemRestrictionApplyAtPointsInElement(CeedElemRestriction rstr, CeedInt elem, CeedTransposeMode t_mode,
                                              CeedVector u, CeedVector ru, CeedRequest *request);
int CeedElemRestrictionCreateUnsignedCopy(CeedElemRestriction rstr, CeedElemRestriction *rstr_unsigned);
int CeedElemRestrictionCreateUnorientedCopy(CeedElemRestriction rstr, CeedElemRestriction *rstr_unoriented);
int CeedElemRestrictionGetCompStride(CeedElemRestriction rstr, CeedInt *comp_stride);
int CeedElemRestrictionGetNumElements(CeedElemRestriction rstr, CeedInt *num_elem);
int CeedElemRestrictionGetElementSize(CeedElemRestriction rstr, CeedInt *elem_size);
int CeedElemRestrictionGetLVectorSize(CeedElemRestriction rstr, CeedSize *l_size);
int CeedElemRestrictionGetEVectorSize(CeedElemRestriction rstr, CeedSize *e_size);
int CeedElemRestrictionGetNumComponents(CeedElemRestriction rstr, CeedInt *num_comp);
int CeedElemRestrictionGetNumBlocks(CeedElemRestriction rstr, CeedInt *num_block);
int CeedElemRestrictionGetBlockSize(CeedElemRestriction rstr, CeedInt *block_size);
int CeedElemRestrictionGetMultiplicity(CeedElemRestriction rstr, CeedVector mult);
int CeedElemRestrictionGetELayout(CeedElemRestriction rstr, CeedInt *layout);
int CeedElemRestrictionGetLLayout(CeedElemRestriction rstr, CeedInt *layout);
int CeedElemRestrictionIsStrided(CeedElemRestriction rstr, bool *is_strided);
int CeedElemRestrictionGetType(CeedElemRestriction rstr, int *rstr_type);
int CeedElemRestrictionGetStrides(CeedElemRestriction rstr, CeedInt *strides);
int CeedElemRestrictionHasBackendStrides(CeedElemRestriction rstr, bool *has_backend_strides);
int CeedElemRestrictionGetCeed(CeedElemRestriction rstr, Ceed *ceed);
int CeedElemRestrictionView(CeedElemRestriction rstr, FILE *stream);
int CeedElemRestrictionDestroy(CeedElemRestriction *rstr);

/* CeedBasis */
int CeedBasisCreateTensorH1Lagrange(Ceed ceed, CeedInt dim, CeedInt num_comp, CeedInt P, CeedInt Q,
                                    CeedQuadMode quad_mode, CeedBasis *basis);
int CeedBasisCreateTensorH1(Ceed ceed, CeedInt dim, CeedInt num_comp, CeedInt P_1d, CeedInt Q_1d,
                            const CeedScalar *interp_1d, const CeedScalar *grad_1d, const CeedScalar *q_ref_1d,
                            const CeedScalar *q_weight_1d, CeedBasis *basis);
int CeedBasisCreateH1(Ceed ceed, CeedElemTopology topo, CeedInt num_comp, CeedInt num_nodes, CeedInt nqpts,
                      const CeedScalar *interp, const CeedScalar *grad, const CeedScalar *q_ref,
                      const CeedScalar *q_weights, CeedBasis *basis);
int CeedBasisCreateHdiv(Ceed ceed, CeedElemTopology topo, CeedInt num_comp, CeedInt num_nodes, CeedInt nqpts,
                        const CeedScalar *interp, const CeedScalar *div, const CeedScalar *q_ref,
                        const CeedScalar *q_weights, CeedBasis *basis);
int CeedBasisCreateHcurl(Ceed ceed, CeedElemTopology topo, CeedInt num_comp, CeedInt num_nodes, CeedInt nqpts,
                         const CeedScalar *interp, const CeedScalar *curl, const CeedScalar *q_ref,
                         const CeedScalar *q_weights, CeedBasis *basis);
int CeedBasisCreateProjection(CeedBasis basis_from, CeedBasis basis_to, CeedBasis *basis_project);
int CeedBasisReferenceCopy(CeedBasis basis, CeedBasis *basis_copy);
int CeedBasisView(CeedBasis basis, FILE *stream);
int CeedBasisApply(CeedBasis basis, CeedInt num_elem, CeedTransposeMode t_mode, CeedEvalMode eval_mode, CeedVector u,
                   CeedVector v);
int CeedBasisApplyAdd(CeedBasis basis, CeedInt num_elem, CeedTransposeMode t_mode, CeedEvalMode eval_mode, CeedVector u,
                      CeedVector v);
int CeedBasisApplyAddAtPoints(CeedBasis basis, CeedInt num_elem, const CeedInt *num_points, CeedTransposeMode t_mode,
                              CeedEvalMode eval_mode, CeedVector x_ref, CeedVector u, CeedVector v);
extern char CeedBasisApplyAtPoints[]; /* a function, of two signatures: its address is cast to the right one */
int CeedBasisGetDimension(CeedBasis basis, CeedInt *dim);
int CeedBasisGetTopology(CeedBasis basis, CeedElemTopology *topo);
int CeedBasisGetNumComponents(CeedBasis basis, CeedInt *num_comp);
int CeedBasisGetNumNodes(CeedBasis basis, CeedInt *P);
int CeedBasisGetNumNodes1D(CeedBasis basis, CeedInt *P_1d);
int CeedBasisGetNumQuadraturePoints(CeedBasis basis, CeedInt *Q);
int CeedBasisGetNumQuadraturePoints1D(CeedBasis basis, CeedInt *Q_1d);
int CeedBasisGetQRef(CeedBasis basis, const CeedScalar **q_ref);
int CeedBasisGetQWeights(CeedBasis basis, const CeedScalar **q_weights);
int CeedBasisGetInterp(CeedBasis basis, const CeedScalar **interp);
int CeedBasisGetInterp1D(CeedBasis basis, const CeedScalar **interp_1d);
int CeedBasisGetGrad(CeedBasis basis, const CeedScalar **grad);
int CeedBasisGetGrad1D(CeedBasis basis, const CeedScalar **grad_1d);
int CeedBasisGetDiv(CeedBasis basis, const CeedScalar **div);
int CeedBasisGetCurl(CeedBasis basis, const CeedScalar **curl);
int CeedBasisIsTensor(CeedBasis basis, bool *is_tensor);
int CeedBasisGetNumQuadratureComponents(CeedBasis basis, CeedEvalMode eval_mode, CeedInt *q_comp);
int CeedBasisGetFESpace(CeedBasis basis, int *fe_space);
int CeedBasisGetCeed(CeedBasis basis, Ceed *ceed);
int CeedBasisDestroy(CeedBasis *basis);

/* CeedQFunction */
typedef int (*CeedQFunctionUser)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out);
int CeedQFunctionCreateInterior(Ceed ceed, CeedInt vec_length, CeedQFunctionUser f, const char *source,
                                CeedQFunction *qf);
int CeedQFunctionCreateInteriorByName(Ceed ceed, const char *name, CeedQFunction *qf);
int CeedQFunctionCreateIdentity(Ceed ceed, CeedInt size, CeedEvalMode in_mode, CeedEvalMode out_mode,
                                CeedQFunction *qf);
int CeedQFunctionReferenceCopy(CeedQFunction qf, CeedQFunction *qf_copy);
int CeedQFunctionAddInput(CeedQFunction qf, const char *field_name, CeedInt size, CeedEvalMode eval_mode);
int CeedQFunctionAddOutput(CeedQFunction qf, const char *field_name, CeedInt size, CeedEvalMode eval_mode);
int CeedQFunctionGetFields(CeedQFunction qf, CeedInt *num_input_fields, CeedQFunctionField **input_fields,
                           CeedInt *num_output_fields, CeedQFunctionField **output_fields);
int CeedQFunctionSetContext(CeedQFunction qf, CeedQFunctionContext ctx);
int CeedQFunctionSetContextWritable(CeedQFunction qf, bool is_writable);
int CeedQFunctionSetUserFlopsEstimate(CeedQFunction qf, CeedSize flops);
int CeedQFunctionGetKernelName(CeedQFunction qf, const char **kernel_name);
int CeedQFunctionGetCeed(CeedQFunction qf, Ceed *ceed);
int CeedQFunctionGetInnerContext(CeedQFunction qf, CeedQFunctionContext *ctx);
int CeedQFunctionView(CeedQFunction qf, FILE *stream);
int CeedQFunctionApply(CeedQFunction qf, CeedInt Q, CeedVector *u, CeedVector *v);
int CeedQFunctionDestroy(CeedQFunction *qf);
int CeedQFunctionFieldGetName(CeedQFunctionField qf_field, const char **field_name);
int CeedQFunctionFieldGetSize(CeedQFunctionField qf_field, CeedInt *size);
int CeedQFunctionFieldGetEvalMode(CeedQFunctionField qf_field, CeedEvalMode *eval_mode);

/* CeedQFunctionContext */
int CeedQFunctionContextCreate(Ceed ceed, CeedQFunctionContext *ctx);
int CeedQFunctionContextReferenceCopy(CeedQFunctionContext ctx, CeedQFunctionContext *ctx_copy);
int CeedQFunctionContextSetData(CeedQFunctionContext ctx, CeedMemType mem_type, CeedCopyMode copy_mode, size_t size,
                                void *data);
int CeedQFunctionContextTakeData(CeedQFunctionContext ctx, CeedMemType mem_type, void *data);
int CeedQFunctionContextGetData(CeedQFunctionContext ctx, CeedMemType mem_type, void *data);
int CeedQFunctionContextGetDataRead(CeedQFunctionContext ctx, CeedMemType mem_type, void *data);
int CeedQFunctionContextRestoreData(CeedQFunctionContext ctx, void *data);
int CeedQFunctionContextRestoreDataRead(CeedQFunctionContext ctx, void *data);
int CeedQFunctionContextRegisterDouble(CeedQFunctionContext ctx, const char *field_name, size_t field_offset,
                                       size_t num_values, const char *field_description);
int CeedQFunctionContextRegisterInt32(CeedQFunctionContext ctx, const char *field_name, size_t field_offset,
                                      size_t num_values, const char *field_description);
int CeedQFunctionContextRegisterBoolean(CeedQFunctionContext ctx, const char *field_name, size_t field_offset,
                                        size_t num_values, const char *field_description);
int CeedContextFieldLabelGetDescription(CeedContextFieldLabel label, const char **field_name, size_t *field_offset,
                                        size_t *num_values, const char **field_description,
                                        CeedContextFieldType *field_type);
int CeedQFunctionContextGetContextSize(CeedQFunctionContext ctx, size_t *ctx_size);
int CeedQFunctionContextGetState(CeedQFunctionContext ctx, uint64_t *state);
int CeedQFunctionContextHasValidData(CeedQFunctionContext ctx, bool *has_valid_data);
int CeedQFunctionContextView(CeedQFunctionContext ctx, FILE *stream);
int CeedQFunctionContextDestroy(CeedQFunctionContext *ctx);

/* CeedOperator */
int CeedOperatorCreate(Ceed ceed, CeedQFunction qf, CeedQFunction dqf, CeedQFunction dqfT, CeedOperator *op);
int CeedOperatorReferenceCopy(CeedOperator op, CeedOperator *op_copy);
int CeedOperatorSetField(CeedOperator op, const char *field_name, CeedElemRestriction r, CeedBasis b, CeedVector v);
int CeedOperatorCheckReady(CeedOperator op);
int CeedOperatorGetActiveVectorLengths(CeedOperator op, CeedSize *input_size, CeedSize *output_size);
int CeedOperatorSetQFunctionAssemblyReuse(CeedOperator op, bool reuse_assembly_data);
int CeedOperatorSetQFunctionAssemblyDataUpdateNeeded(CeedOperator op, bool needs_data_update);
int CeedOperatorLinearAssembleQFunction(CeedOperator op, CeedVector *assembled, CeedElemRestriction *rstr,
                                        CeedRequest *request);
int CeedOperatorLinearAssembleQFunctionBuildOrUpdate(CeedOperator op, CeedVector *assembled, CeedElemRestriction *rstr,
                                                     CeedRequest *request);
int CeedOperatorLinearAssembleDiagonal(CeedOperator op, CeedVector assembled, CeedRequest *request);
int CeedOperatorLinearAssembleAddDiagonal(CeedOperator op, CeedVector assembled, CeedRequest *request);
int CeedOperatorLinearAssemblePointBlockDiagonal(CeedOperator op, CeedVector assembled, CeedRequest *request);
int CeedOperatorLinearAssembleAddPointBlockDiagonal(CeedOperator op, CeedVector assembled, CeedRequest *request);
int CeedOperatorLinearAssembleGetNumEntries(CeedOperator op, CeedSize *num_entries);
int CeedOperatorLinearAssemblePointBlockDiagonalSymbolic(CeedOperator op, CeedSize *num_entries, CeedInt **rows,
                                                         CeedInt **cols);
int CeedOperatorLinearAssembleSymbolic(CeedOperator op, CeedSize *num_entries, CeedInt **rows, CeedInt **cols);
int CeedOperatorLinearAssemble(CeedOperator op, CeedVector values);
int CeedOperatorMultigridLevelCreate(CeedOperator op_fine, CeedVector p_mult_fine, CeedElemRestriction rstr_coarse,
                                     CeedBasis basis_coarse, CeedOperator *op_coarse, CeedOperator *op_prolong,
                                     CeedOperator *op_restrict);
int CeedOperatorMultigridLevelCreateTensorH1(CeedOperator op_fine, CeedVector p_mult_fine,
                                             CeedElemRestriction rstr_coarse, CeedBasis basis_coarse,
                                             const CeedScalar *interp_c_to_f, CeedOperator *op_coarse,
                                             CeedOperator *op_prolong, CeedOperator *op_restrict);
int CeedOperatorMultigridLevelCreateH1(CeedOperator op_fine, CeedVector p_mult_fine, CeedElemRestriction rstr_coarse,
                                       CeedBasis basis_coarse, const CeedScalar *interp_c_to_f,
                                       CeedOperator *op_coarse, CeedOperator *op_prolong, CeedOperator *op_restrict);
int CeedOperatorCreateFDMElementInverse(CeedOperator op, CeedOperator *fdm_inv, CeedRequest *request);
int CeedOperatorSetName(CeedOperator op, const char *name);
int CeedOperatorView(CeedOperator op, FILE *stream);
int CeedOperatorViewTerse(CeedOperator op, FILE *stream);
int CeedOperatorGetCeed(CeedOperator op, Ceed *ceed);
int CeedOperatorGetNumElements(CeedOperator op, CeedInt *num_elem);
int CeedOperatorGetNumQuadraturePoints(CeedOperator op, CeedInt *num_qpts);
int CeedOperatorGetFlopsEstimate(CeedOperator op, CeedSize *flops);
int CeedOperatorGetQFunction(CeedOperator op, CeedQFunction *qf);
int CeedOperatorGetFields(CeedOperator op, CeedInt *num_input_fields, CeedOperatorField **input_fields,
                          CeedInt *num_output_fields, CeedOperatorField **output_fields);
int CeedOperatorFieldGetName(CeedOperatorField op_field, const char **field_name);
int CeedOperatorFieldGetVector(CeedOperatorField op_field, CeedVector *vec);
int CeedOperatorIsAtPoints(CeedOperator op, bool *is_at_points);
int CeedOperatorAtPointsGetPoints(CeedOperator op, CeedElemRestriction *rstr_points, CeedVector *point_coords);
int CeedOperatorIsComposite(CeedOperator op, bool *is_composite);
int CeedOperatorGetContext(CeedOperator op, CeedQFunctionContext *ctx);
int CeedOperatorGetContextFieldLabel(CeedOperator op, const char *field_name, CeedContextFieldLabel *field_label);
int CeedOperatorSetContextDouble(CeedOperator op, CeedContextFieldLabel field_label, double *values);
int CeedOperatorSetContextInt32(CeedOperator op, CeedContextFieldLabel field_label, int32_t *values);
int CeedOperatorSetContextBoolean(CeedOperator op, CeedContextFieldLabel field_label, bool *values);
int CeedOperatorGetContextDoubleRead(CeedOperator op, CeedContextFieldLabel field_label, size_t *num_values,
                                     const double **values);
int CeedOperatorRestoreContextDoubleRead(CeedOperator op, CeedContextFieldLabel field_label, const double **values);
int CeedOperatorGetContextInt32Read(CeedOperator op, CeedContextFieldLabel field_label, size_t *num_values,
                                    const int32_t **values);
int CeedOperatorRestoreContextInt32Read(CeedOperator op, CeedContextFieldLabel field_label, const int32_t **values);
int CeedOperatorGetContextBooleanRead(CeedOperator op, CeedContextFieldLabel field_label, size_t *num_values,
                                      const bool **values);
int CeedOperatorRestoreContextBooleanRead(CeedOperator op, CeedContextFieldLabel field_label, const bool **values);
int CeedOperatorAssemblyDataStrip(CeedOperator op);
int CeedOperatorCreateAtPoints(Ceed ceed, CeedQFunction qf, CeedQFunction dqf, CeedQFunction dqfT, CeedOperator *op);
int CeedOperatorAtPointsSetPoints(CeedOperator op, CeedElemRestriction rstr_points, CeedVector point_coords);
int CeedOperatorApply(CeedOperator op, CeedVector in, CeedVector out, CeedRequest *request);
int CeedOperatorApplyAdd(CeedOperator op, CeedVector in, CeedVector out, CeedRequest *request);
int CeedOperatorApplyAddActive(CeedOperator op, CeedVector in, CeedVector out, CeedRequest *request);
int CeedOperatorDestroy(CeedOperator *op);

/* Composite operators: the first names are those of 0.12 and 0.13, the second ones those that replaced them. */
int CeedCompositeOperatorCreate(Ceed ceed, CeedOperator *op);
int CeedCompositeOperatorAddSub(CeedOperator composite_op, CeedOperator sub_op);
int CeedOperatorCreateComposite(Ceed ceed, CeedOperator *op);
int CeedOperatorCompositeAddSub(CeedOperator composite_op, CeedOperator sub_op);
int CeedOperatorCompositeSetSequential(CeedOperator op, bool is_sequential);
int CeedOperatorCompositeIsSequential(CeedOperator op, bool *is_sequential);
int CeedCompositeOperatorGetNumSub(CeedOperator op, CeedInt *num_suboperators);
int CeedOperatorCompositeGetNumSub(CeedOperator op, CeedInt *num_suboperators);
int CeedCompositeOperatorGetSubList(CeedOperator op, CeedOperator **sub_operators);
int CeedOperatorCompositeGetSubList(CeedOperator op, CeedOperator **sub_operators);
int CeedCompositeOperatorGetMultiplicity(CeedOperator op, CeedInt num_skip_indices, CeedInt *skip_indices,
                                         CeedVector mult);
int CeedOperatorCompositeGetMultiplicity(CeedOperator op, CeedInt num_skip_indices, CeedInt *skip_indices,
                                         CeedVector mult);

/* The C library that libCEED is linked with: its memory, and text that libCEED prints. */
void free(void *pointer);
FILE *open_memstream(char **buffer, size_t *size);
int fclose(FILE *stream);
