"""Every public name of Horovod 0.28, by the section of docs/horovod.md that has to list it."""

from __future__ import annotations

_BASICS = """
init shutdown is_initialized rank size local_rank local_size cross_rank cross_size is_homogeneous
mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built
cuda_built rocm_built start_timeline stop_timeline Average Sum Adasum Min Max Product ProcessSet
ProcessSet.size ProcessSet.rank ProcessSet.included ProcessSet.process_set_id ProcessSet.ranks
ProcessSet.mpi_comm global_process_set add_process_set remove_process_set HorovodInternalError
"""
_TORCH = """
DistributedOptimizer DistributedOptimizer.synchronize DistributedOptimizer.skip_synchronize
DistributedOptimizer.step DistributedOptimizer.zero_grad DistributedOptimizer.load_state_dict
DistributedOptimizer.set_backward_passes_per_step DistributedOptimizer._parameter_names
broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object allreduce
allreduce_ allreduce_async allreduce_async_ grouped_allreduce grouped_allreduce_
grouped_allreduce_async grouped_allreduce_async_ sparse_allreduce_async allgather allgather_async
grouped_allgather grouped_allgather_async broadcast broadcast_ broadcast_async broadcast_async_
alltoall alltoall_async reducescatter reducescatter_async grouped_reducescatter
grouped_reducescatter_async join barrier poll synchronize Compression.none Compression.fp16
Compressor.compress Compressor.decompress SyncBatchNorm elastic.run elastic.TorchState
elastic.TorchState.commit elastic.TorchState.save elastic.TorchState.restore
elastic.TorchState.sync elastic.TorchState.check_host_updates
elastic.TorchState.register_reset_callbacks elastic.TorchState.on_reset
elastic.state.get_handler_registry elastic.state.set_handler_registry
elastic.ElasticSampler elastic.ElasticSampler.set_epoch elastic.ElasticSampler.record_batch
elastic.ElasticSampler.state_dict elastic.ElasticSampler.load_state_dict
elastic.ElasticSampler.reset
"""
_TENSORFLOW = """
DistributedGradientTape DistributedGradientTape.gradient
DistributedGradientTape.register_local_source
DistributedGradientTape.get_local_and_global_gradients PartialDistributedGradientTape
DistributedOptimizer broadcast_variables broadcast_global_variables BroadcastGlobalVariablesHook
broadcast_object broadcast_object_fn allgather_object allreduce grouped_allreduce allgather
grouped_allgather broadcast broadcast_ alltoall reducescatter grouped_reducescatter join size_op
local_size_op rank_op local_rank_op process_set_included_op SyncBatchNormalization
Compression.none Compression.fp16 Compressor elastic.run elastic.TensorFlowState
elastic.TensorFlowKerasState data.compute_service check_num_rank_power_of_2 _executing_eagerly
util._executing_eagerly mpi_ops._basics LocalGradientAggregationHelper
"""
_KERAS = """
DistributedOptimizer PartialDistributedOptimizer load_model allreduce allgather broadcast
reducescatter broadcast_global_variables callbacks.BroadcastGlobalVariablesCallback
callbacks.MetricAverageCallback callbacks.LearningRateWarmupCallback
callbacks.LearningRateScheduleCallback callbacks.BestModelCheckpoint Compression.none
Compression.fp16 elastic.run elastic.KerasState elastic.CommitStateCallback
elastic.UpdateBatchStateCallback elastic.UpdateEpochStateCallback
"""
_RUN = """
func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile
host_discovery_script start_timeout ssh_port ssh_identity_file disable_cache output_filename
verbose use_gloo use_mpi mpi_args network_interface network_interfaces executable np min_np max_np
"""
_FLAGS = """
-np --num-proc -H --hosts -hostfile --hostfile -v --version -cb --check-build --verbose
--start-timeout --disable-cache --network-interfaces --network-interface --output-filename
--config-file -p --ssh-port -i --ssh-identity-file --fusion-threshold-mb --cycle-time-ms
--cache-capacity --hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather
--no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune
--autotune-log-file --autotune-warmup-samples --autotune-steps-per-sample
--autotune-bayes-opt-max-samples --autotune-gaussian-process-noise --min-np --min-num-proc --max-np
--max-num-proc --slots-per-host --elastic-timeout --reset-limit --blacklist-cooldown-range
--host-discovery-script --timeline-filename --timeline-mark-cycles --no-timeline-mark-cycles
--stall-check --no-stall-check --stall-check-warning-time-seconds
--stall-check-shutdown-time-seconds --mpi-threads-disable --no-mpi-threads-disable --mpi-args --tcp
--binding-args --num-nccl-streams --thread-affinity --gloo-timeout-seconds --log-level
--log-with-timestamp --log-without-timestamp -prefix-timestamp --prefix-output-with-timestamp
--gloo --mpi --jsrun
"""
_KNOBS = """
FUSION_THRESHOLD CYCLE_TIME CACHE_CAPACITY TIMELINE TIMELINE_MARK_CYCLES STALL_CHECK_DISABLE
STALL_CHECK_TIME_SECONDS STALL_SHUTDOWN_TIME_SECONDS AUTOTUNE AUTOTUNE_LOG
AUTOTUNE_WARMUP_SAMPLES AUTOTUNE_STEPS_PER_SAMPLE AUTOTUNE_BAYES_OPT_MAX_SAMPLES
AUTOTUNE_GAUSSIAN_PROCESS_NOISE HIERARCHICAL_ALLREDUCE HIERARCHICAL_ALLGATHER TORUS_ALLREDUCE
NUM_NCCL_STREAMS BATCH_D2D_MEMCOPIES ENABLE_ASYNC_COMPLETION ENABLE_XLA_OPS DISABLE_GROUP_FUSION
DISABLE_NVTX_RANGES CONTROLLER CPU_OPERATIONS GLOO_IFACE GLOO_TIMEOUT_SECONDS MPI_THREADS_DISABLE
THREAD_AFFINITY CCL_CACHE ADASUM_MPI_CHUNK_SIZE DYNAMIC_PROCESS_SETS ELASTIC ELASTIC_TIMEOUT
START_TIMEOUT LOG_LEVEL LOG_HIDE_TIME
"""
_GIVEN = """
HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE HOROVOD_CROSS_RANK
HOROVOD_CROSS_SIZE HOROVOD_HOSTNAME HOROVOD_GLOO_RENDEZVOUS_ADDR HOROVOD_GLOO_RENDEZVOUS_PORT
HOROVOD_CONTROLLER HOROVOD_CPU_OPERATIONS NCCL_SOCKET_IFNAME PYTHONUNBUFFERED
"""
_MODULES = "horovod.spark horovod.ray horovod.mxnet horovod.data"

# By the first word of the section's heading.
NAMES: dict[str, list[str]] = {
    "Everywhere": _BASICS.split(),
    "PyTorch": _TORCH.split(),
    "TensorFlow": _TENSORFLOW.split(),
    "Keras": _KERAS.split(),
    "From": _RUN.split(),
    "Flags": _FLAGS.split(),
    "Variables that Horovod reads": [f"HOROVOD_{name}" for name in _KNOBS.split()],
    "Variables that ranks get": _GIVEN.split(),
    "The rest": _MODULES.split(),
}
