# Writes UPSTREAM beside the libraries: the pin of patches/UPSTREAM, and a digest of the headers that ggml's backends are
# compiled with. A backend that is installed apart is loaded only where both are the same (`moegguf/native/plugins.py`).
file(GLOB headers CONFIGURE_DEPENDS ${LLAMA_DIR}/ggml/include/*.h ${LLAMA_DIR}/ggml/src/ggml*.h)
set(digests "")
foreach (header IN LISTS headers)
    file(SHA256 ${header} digest)
    string(APPEND digests ${digest})
endforeach()
string(SHA256 headers_digest "${digests}")
string(SUBSTRING ${headers_digest} 0 12 headers_digest)
file(READ ${MOEGGUF_ROOT}/patches/UPSTREAM pin)
file(WRITE ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/UPSTREAM "${pin}ggml_headers = ${headers_digest}\n")
