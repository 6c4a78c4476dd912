# Writes the file UPSTREAM into the folder of the libraries: the pin from patches/UPSTREAM, and a digest of the headers
# with which ggml's backends are compiled. A backend from another package is loaded only if it has the same pin and
# digest (`moegguf/native/plugins.py`).
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
